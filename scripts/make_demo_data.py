"""Make the demo's conversations: short texts turned into JSON, answered by the demo target itself.

Prompts are ours: kinds of text, wordings and instructions, filled from the lists below by a seeded generator.
`TRAINING` makes the training file and, with new values in the same templates, the held-out one. `UNSEEN` makes a second
held-out file and shares nothing with it: other kinds, keys, wordings, instructions, names and places.

Answers are the target's greedy ones in float32. A drafter learns what *its* target says, so they are kept right or
wrong; dropped and counted are prompts over `MAX_USER_TOKENS`, answers that do not end within `MAX_ANSWER_TOKENS`
(loops) and those whose text does not tokenise back to the generated ids.

    python scripts/make_demo_data.py --device cuda    # writes paceline/data/samples/extraction_*.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from paceline.eval.answers import greedy_answers, round_trips
from paceline.models.assets import demo_target

SAMPLES = Path(__file__).parents[1] / "paceline" / "data" / "samples"
TRAIN_SEED, HELDOUT_SEED, UNSEEN_SEED = 1, 2, 3
MAX_USER_TOKENS = 90
"""Of the user's own words; the chat template adds a system turn and marks."""
MAX_ANSWER_TOKENS = 96
"""End token included."""


@dataclass(frozen=True)
class Kind:
    """One kind of text: its keys, and wordings that contain each of them once."""

    name: str
    keys: tuple[str, ...]
    wordings: tuple[str, ...]


@dataclass(frozen=True)
class Templates:
    """What prompts are made of.

    Attributes:
        instructions: Wordings of the user turn; fields are ``text``, ``keys`` and ``empty`` (the JSON to fill in).
        values: Where the value of a key comes from: a list or range to draw from, or a pattern over other values.
    """

    kinds: tuple[Kind, ...]
    instructions: tuple[str, ...]
    values: Mapping[str, Sequence[str] | range | str]


def _listed(text: str) -> list[str]:
    """Values of a list written with commas."""
    return [value.strip() for value in text.split(",")]


_CITIES = (
    "Lisbon Hamburg Toronto Nairobi Oslo Prague Madrid Vienna Chicago Osaka Dublin Athens Geneva Boston Turin "
    "Lima Warsaw Cairo Sydney Porto Berlin Paris London Rome Milan Naples Munich Zurich Basel Brussels Ghent "
    "Rotterdam Utrecht Stockholm Helsinki Bergen Krakow Budapest Belgrade Zagreb Seville Valencia Bilbao Lyon "
    "Montreal Vancouver Seattle Denver Houston Miami Havana Bogota Quito Santiago Mumbai Delhi Seoul Kyoto "
    "Manila Jakarta Perth Accra Lagos Tunis"
).split()
_TEAMS = (
    "Falcons Wolves Tigers Bears Sharks Eagles Lions Panthers Hornets Rockets Knights Pirates Giants Dragons Raiders "
    "Comets Vikings Bulls Hawks Wizards Rangers Storm Titans Royals"
).split()

_GIVEN_NAMES = (
    "Aaron Bridget Conrad Daphne Elliot Fiona Gareth Heidi Isaac Jasmine Kenneth Lydia Malcolm Nora Oliver "
    "Penelope Ralph Sylvia Trevor Valerie Wesley Yvonne Zachary Abigail Benedict Cecilia Damian Eleanor "
    "Frederick Georgia Harold Imogen Jerome Kathleen Lionel Miriam Nathan Ophelia Patrick Rebecca Samuel "
    "Theresa Vincent Winifred Alistair Brenda Clifford Deborah"
).split()
_FAMILY_NAMES = (
    "Atkinson Barlow Chambers Dawson Ellison Fairbanks Gallagher Hawkins Ingram Jefferson Kirkland Lawson "
    "Macleod Norwood Osborne Pemberton Radcliffe Sheffield Thornton Underwood Vaughan Whitaker Yardley "
    "Ashworth Blackwood Crawford Donovan Everett Fletcher Goodwin Harrington Irving Jennings Kendall Lancaster "
    "Merriweather Nicholson Ogden Prescott Rutherford Stanfield Templeton Wainwright Winslow"
).split()

TRAINING = Templates(
    kinds=(
        Kind(
            name="person",
            keys=("name", "age", "city", "job"),
            wordings=(
                "{name} is {age} years old, lives in {city} and works as a {job}.",
                "My name is {name}, my age is {age}. I work as a {job} in the city of {city}.",
                "{name}, aged {age}, is a {job} in {city}.",
            ),
        ),
        Kind(
            name="hobby",
            keys=("name", "age", "city", "hobby"),
            wordings=(
                "{name} is {age}, lives in {city} and has the hobby {hobby}.",
                "My name is {name}, my age is {age}, my city is {city}, my hobby is {hobby}.",
                "{name} from {city} is {age} and has one hobby: {hobby}.",
            ),
        ),
        Kind(
            name="student",
            keys=("name", "age", "school", "subject"),
            wordings=(
                "{name} is {age}, goes to {school} and loves {subject}.",
                "{name}, a student at {school}, is {age} and likes {subject}.",
                "My name is {name}, I am {age}. My school is {school}, my best subject is {subject}.",
            ),
        ),
        Kind(
            name="employee",
            keys=("name", "job", "department", "phone"),
            wordings=(
                "{name} works as a {job} in the {department} department, phone {phone}.",
                "My name is {name}, my job is {job}, my department is {department}, my phone is {phone}.",
                "Name: {name}. Job: {job}. Department: {department}. Phone: {phone}.",
            ),
        ),
        Kind(
            name="birthday",
            keys=("name", "birthday", "city"),
            wordings=(
                "{name} lives in {city} and has a birthday on {birthday}.",
                "The birthday of {name} from {city} is {birthday}.",
                "{name} was born in {city} on {birthday}.",
            ),
        ),
        Kind(
            name="contact",
            keys=("name", "email", "phone"),
            wordings=(
                "You can reach {name} by email at {email} or by phone at {phone}.",
                "{name}. Email: {email}. Phone: {phone}.",
                "{name} has the email {email} and the phone number {phone}.",
            ),
        ),
        Kind(
            name="delivery",
            keys=("name", "street", "city", "phone"),
            wordings=(
                "Please send it to {name}, {street}, {city}. Phone: {phone}.",
                "{name} lives at {street} in {city}, phone {phone}.",
                "The address of {name} is {street}, {city}. The phone number is {phone}.",
            ),
        ),
        Kind(
            name="meeting",
            keys=("name", "day", "time", "room"),
            wordings=(
                "{name} has a meeting on {day} at {time} in room {room}.",
                "Please meet {name} on {day} at {time} in room {room}.",
                "{name} waits in room {room} on {day} at {time}.",
            ),
        ),
        Kind(
            name="appointment",
            keys=("name", "doctor", "day", "time"),
            wordings=(
                "{name} has an appointment with {doctor} on {day} at {time}.",
                "{name} will see {doctor} on {day} at {time}.",
                "Name: {name}. Doctor: {doctor}. Day: {day}. Time: {time}.",
            ),
        ),
        Kind(
            name="course",
            keys=("course", "teacher", "day", "room"),
            wordings=(
                "The {course} course with the teacher {teacher} is on {day} in room {room}.",
                "{teacher} is the teacher of the {course} course. The day is {day}, the room is {room}.",
                "Course: {course}. Teacher: {teacher}. Day: {day}. Room: {room}.",
            ),
        ),
        Kind(
            name="job offer",
            keys=("company", "position", "city", "salary"),
            wordings=(
                "The company {company} in {city} has the position {position}. The salary is {salary} euros.",
                "{company} is a company in {city}. The position is {position}, the salary {salary} euros.",
                "Company: {company}. Position: {position}. City: {city}. Salary: {salary} euros.",
            ),
        ),
        Kind(
            name="order",
            keys=("name", "item", "quantity", "price"),
            wordings=(
                "{name} ordered {quantity} {item}. The price is {price} euros.",
                "{name} bought the item {item}, quantity {quantity}, price {price} euros.",
                "Name: {name}. Item: {item}. Quantity: {quantity}. Price: {price} euros.",
            ),
        ),
        Kind(
            name="product",
            keys=("product", "brand", "color", "price"),
            wordings=(
                "The {product} by {brand} has the color {color} and the price is {price} euros.",
                "For sale: a {color} {product} of the brand {brand}, price {price} euros.",
                "Product: {product}. Brand: {brand}. Color: {color}. Price: {price} euros.",
            ),
        ),
        Kind(
            name="hotel",
            keys=("name", "hotel", "nights"),
            wordings=(
                "{name} stays at the hotel {hotel} for {nights} nights.",
                "{name} booked {nights} nights at the hotel {hotel}.",
                "Name: {name}. Hotel: {hotel}. Nights: {nights}.",
            ),
        ),
        Kind(
            name="rental",
            keys=("city", "rooms", "rent"),
            wordings=(
                "The flat in {city} has {rooms} rooms and the rent is {rent} euros.",
                "A flat in {city}. Rooms: {rooms}. Rent: {rent} euros.",
                "City: {city}. Rooms: {rooms}. Rent: {rent} euros.",
            ),
        ),
        Kind(
            name="book",
            keys=("title", "author", "year"),
            wordings=(
                "{title} is a novel by {author}, published in {year}.",
                "In {year}, {author} wrote the book {title}.",
                "The title is {title}, the author is {author}, the year is {year}.",
            ),
        ),
        Kind(
            name="match",
            keys=("winner", "loser", "score"),
            wordings=(
                "The winner is {winner}, the loser is {loser} and the score is {score}.",
                "{winner} is the winner and {loser} the loser. The score was {score}.",
                "Winner: {winner}. Loser: {loser}. Score: {score}.",
            ),
        ),
        Kind(
            name="weather",
            keys=("city", "weather", "temperature"),
            wordings=(
                "The weather in {city} is {weather}, the temperature is {temperature} degrees.",
                "{city} has {weather} weather and a temperature of {temperature} degrees.",
                "City: {city}. Weather: {weather}. Temperature: {temperature} degrees.",
            ),
        ),
        Kind(
            name="pet",
            keys=("pet", "animal", "color"),
            wordings=(
                "The pet {pet} is a {animal} and the color is {color}.",
                "My pet is called {pet}. This animal is a {animal} and its color is {color}.",
                "Pet: {pet}. Animal: {animal}. Color: {color}.",
            ),
        ),
    ),
    instructions=(
        "Text: {text}\n\nFill in this JSON: {empty}",
        "Fill this JSON from the text. Answer with JSON only.\n\nText: {text}\n\nJSON: {empty}",
        "Text: {text}\n\nComplete this JSON: {empty}",
        "Complete the JSON {empty} with the values from this text: {text}",
        "Text: {text}\n\nTurn this text into JSON with the keys {keys}. Answer with the JSON only.",
        "Return a JSON object with {keys}. Answer with JSON only.\n\nText: {text}",
    ),
    values={
        "first": (
            "Ada Bruno Carla Dario Elena Felix Greta Hugo Irene Jonas Klara Leon Mara Nils Olga Pedro Rosa Simon Tessa "
            "Viktor Wanda Yusuf Amina Boris Chloe Emil Fatima Gustav Hanna Ivan Julia Kofi Lena Marco Nadia Oscar "
            "Paula Rahul Sofia Tomas Agnes Albert Beatrice Caleb Diana Edgar Esther Farid Gloria Henrik Ingrid Jamal "
            "Karin Lukas Martha Naomi Otto Priya Quentin Rita Stefan Tamara Ursula Vera Walter Xenia Yara Zoe Anton "
            "Bianca Cyril Doris"
        ).split(),
        "last": (
            "Abbott Becker Castillo Dahl Eriksen Fontaine Greco Hartmann Ibsen Jansen Keller Lindberg Moreau Novak "
            "Okafor Petrov Quinn Rossi Schmidt Tanaka Ueda Vargas Weber Young Zeller Bianchi Cohen Duarte Engel "
            "Fischer Gupta Horvat Alvarez Brandt Carvalho Delgado Esposito Ferrari Gruber Hansen Iversen Jokinen "
            "Kovacs Larsen Mendes Nakamura Olsen Pereira Ramirez Santos Takahashi Ulrich Visser Winter Yamada "
            "Zimmermann Andersson Baptiste Costa Dubois Egger Flores Garcia Haddad Jacobs"
        ).split(),
        "city": _CITIES,
        "job": (
            "teacher nurse pilot baker lawyer dentist doctor writer musician photographer journalist carpenter plumber "
            "farmer chef waiter tailor gardener librarian mechanic painter biologist chemist translator surgeon"
        ).split(),
        "hobby": (
            "chess tennis hiking cooking reading painting cycling swimming gardening football yoga dancing fishing "
            "sailing knitting pottery climbing running skiing karate poker badminton singing golf"
        ).split(),
        "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
        "month": "January February March April May June July August September October November December".split(),
        "day_of_month": range(1, 29),
        "hour": range(7, 20),
        "minute": "00 10 15 20 30 40 45 50".split(),
        "time": "{hour}:{minute}",
        "room": range(101, 400),
        "name": "{first} {last}",
        "author": "{first} {last}",
        "teacher": "{first} {last}",
        "doctor": "Dr. {doctor_last}",
        "doctor_last": (
            "Abel Brenner Conti Dorn Evers Falk Gomez Holm Iqbal Jung Kaya Lorenz Marino Nagel Orsini Pohl Reyes Silva "
            "Thoma Urban Vidal Wolff Zanetti"
        ).split(),
        "age": range(16, 70),
        "email": "{nickname}{number}@{host}",
        "nickname": (
            "sunny.river blue.fox old.tree tiny.cloud wild.rose quick.cat lucky.star red.apple happy.owl "
            "green.tea silver.moon night.train soft.snow big.bear calm.sea"
        ).split(),
        "number": range(10, 100),
        "host": "example.com example.org example.net mail.example.com".split(),
        "phone": "555-01{number}",
        "item": (
            "notebooks lamps chairs mugs pencils cushions batteries candles envelopes towels spoons plates "
            "helmets bottles baskets mirrors clocks carpets blankets bowls shelves hammers ladders brushes"
        ).split(),
        "quantity": range(2, 60),
        "price": range(5, 300),
        "title": "The {adjective} {noun}",
        "adjective": (
            "Silent Broken Golden Hidden Last Lonely Burning Forgotten Empty Crimson Distant Secret Frozen "
            "Wandering Hollow Bitter Sleeping Stolen Patient Winding"
        ).split(),
        "noun": (
            "Garden Bridge Letter Harbor Mountain Window Orchard Island Mirror Forest Kingdom Lantern Ocean Road "
            "Shadow Tower Valley Voice Station Daughter"
        ).split(),
        "year": range(1950, 2025),
        "rooms": range(2, 7),
        "rent": range(400, 2000, 10),
        "product": (
            "backpack jacket bicycle kettle umbrella sofa desk suitcase scarf toaster phone camera guitar "
            "helmet blender wallet sweater radio tent printer fridge pillow hat bench"
        ).split(),
        "brand": (
            "Velora Kantor Brisk Lumex Orbita Tavo Nordik Zephyr Quanta Solis Fabrio Mintal Rovex Halden Pixara "
            "Dromo Calyx Ventro Ostara Kepler"
        ).split(),
        "color": "red blue green yellow black white brown gray orange purple pink beige".split(),
        "position": _listed(
            "sales manager, web designer, cook, bus driver, data analyst, cashier, security guard, store manager, "
            "receptionist, truck driver, project manager, lab technician, warehouse worker, software developer, "
            "bookkeeper, math tutor, night porter, tour guide, product designer, social worker"
        ),
        "company": "{company_word} {company_type}",
        "company_word": (
            "Brightline Northgate Silverfox Bluepeak Redwood Sunfield Ironbridge Clearwater Greenleaf "
            "Starlight Hillcrest Riverbend Stonewall Fairwind Goldcrest Oakridge Maplewood Whitecap"
        ).split(),
        "company_type": "Group Foods Systems Media Logistics Energy Studios Labs Bank Travel".split(),
        "salary": range(24000, 90000, 500),
        "winner": _TEAMS,
        "loser": _TEAMS,
        "score": "{winner_goals}:{loser_goals}",
        "winner_goals": range(3, 7),
        "loser_goals": range(3),
        "weather": "sunny cloudy rainy windy foggy stormy snowy misty humid dry hazy frosty".split(),
        "temperature": range(1, 36),
        "pet": (
            "Bella Charlie Luna Max Coco Rocky Milo Daisy Buddy Lucy Simba Nala Oreo Pepper Toby Molly Ginger Shadow "
            "Teddy Rusty Maple Biscuit Pumpkin Ziggy"
        ).split(),
        "animal": "dog cat rabbit hamster parrot goat pony turtle ferret goose donkey lizard duck canary".split(),
        "course": (
            "Spanish French biology history geometry chemistry physics music drawing geography economics "
            "German philosophy algebra Italian statistics ballet literature"
        ).split(),
        "hotel": (
            "Aurora Bellevue Continental Regina Metropol Alpina Esplanade Imperial Panorama Riviera "
            "Excelsior Savoy Central Miramar Victoria Belvedere Palace Bristol"
        ).split(),
        "nights": range(2, 15),
        "school": "{school_name} School",
        "school_name": (
            "Lakeside Parkview Elmwood Brookfield Meadow Pinecrest Cedar Oakwood Birchwood Riverdale Hilltop Fairview "
            "Northside Westwood Greenfield Valley"
        ).split(),
        "subject": "math science English history geography art music chemistry physics biology sports".split(),
        "birthday": "{month} {day_of_month}",
        "department": "marketing finance design research support security legal training planning sales audit".split(),
        "street": "{house_number} {street_name} Street",
        "house_number": range(1, 200),
        "street_name": (
            "Mill High Park Church Station Garden Lake Bridge Castle Spring School Forest Rose Queen North Tower "
            "Market River Baker Linden"
        ).split(),
    },
)

UNSEEN = Templates(
    kinds=(
        Kind(
            name="insurance",
            keys=("name", "insurer", "premium"),
            wordings=(
                "{name} pays {insurer}, the insurer, a premium of {premium} dollars.",
                "Name {name}, insurer {insurer}, premium {premium} dollars.",
                "{insurer} is the insurer of {name}, who pays a premium of {premium} dollars.",
            ),
        ),
        Kind(
            name="medal",
            keys=("athlete", "country", "sport", "medal"),
            wordings=(
                "{athlete} is an athlete of {country} whose sport is {sport} and whose medal is {medal}.",
                "Athlete {athlete}, country {country}, sport {sport}, medal {medal}.",
            ),
        ),
        Kind(
            name="parcel",
            keys=("sender", "recipient", "weight"),
            wordings=(
                "The sender is {sender}, the recipient is {recipient}, the parcel has a weight of {weight} kg.",
                "Parcel: sender {sender}, recipient {recipient}, weight {weight} kg.",
            ),
        ),
        Kind(
            name="prescription",
            keys=("name", "medicine", "dose"),
            wordings=(
                "{name} takes the medicine {medicine}; the dose is {dose} mg.",
                "Medicine {medicine}, dose {dose} mg, name {name}.",
                "{name} needs a dose of {dose} mg of the medicine {medicine}.",
            ),
        ),
        Kind(
            name="scholar",
            keys=("name", "university", "degree"),
            wordings=(
                "{name} holds a degree in {degree} awarded by {university} university.",
                "Name {name}, university {university}, degree {degree}.",
                "{name} went to {university} university, earning a {degree} degree.",
            ),
        ),
        Kind(
            name="used car",
            keys=("model", "fuel", "mileage"),
            wordings=(
                "The used car is a {model}, its fuel is {fuel} and its mileage is {mileage} km.",
                "Used car, model {model}, fuel {fuel}, mileage {mileage} km.",
            ),
        ),
    ),
    instructions=(
        (
            "Insert the details of the sentence into a JSON record. Output JSON, no prose.\n\n"
            "Sentence: {text}\n\nRecord: {empty}"
        ),
        "Which details belong inside {empty} according to the sentence? Output JSON, no prose.\n\nSentence: {text}",
        "{text}\n\nMake a JSON record of that sentence. Its fields: {keys}. Do not add anything else.",
        "Sentence: {text}\n\nI need a filled copy of this JSON: {empty}",
    ),
    values={
        "given_name": _GIVEN_NAMES,
        "other_given_name": _GIVEN_NAMES,
        "family_name": _FAMILY_NAMES,
        "other_family_name": _FAMILY_NAMES,
        "name": "{given_name} {family_name}",
        "sender": "{given_name} {family_name}",
        "recipient": "{other_given_name} {other_family_name}",
        "athlete": "{given_name} {family_name}",
        "university": (
            "Adelaide Aberdeen Calgary Dallas Edinburgh Glasgow Hanover Istanbul Jaipur Karachi Leipzig "
            "Melbourne Nashville Ottawa Palermo Quebec Riga Salzburg Tallinn Uppsala Wellington Zaragoza Cardiff "
            "Phoenix Detroit"
        ).split(),
        "weight": [f"{tenths / 10}" for tenths in range(12, 200)],
        "model": "{maker} {model_number}",
        "maker": "Toyota Volvo Honda Mazda Renault Peugeot Skoda Nissan Opel Suzuki Fiat Subaru Hyundai".split(),
        "model_number": "X3 C40 500L i20 RS7 GT4 E90 S60 V8 D12".split(),
        "mileage": range(90500, 240000, 500),
        "fuel": "diesel petrol electricity hydrogen ethanol biogas".split(),
        "country": (
            "Chile Nepal Kenya Norway Peru Bolivia Georgia Iceland Morocco Ecuador Canada Turkey Japan Mexico "
            "Slovenia Tanzania Bhutan Andorra Armenia Ethiopia Poland Finland Ireland Portugal"
        ).split(),
        "medicine": (
            "ibuprofen aspirin penicillin insulin morphine codeine amoxicillin paracetamol melatonin cortisone "
            "warfarin lithium naproxen heparin"
        ).split(),
        "dose": range(415, 995, 10),
        "sport": (
            "judo rowing archery fencing wrestling boxing curling handball triathlon surfing diving gymnastics "
            "weightlifting canoeing bobsleigh javelin"
        ).split(),
        "medal": "gold silver bronze".split(),
        "degree": (
            "law nursing architecture astronomy linguistics accounting medicine engineering theology botany "
            "anthropology zoology geology optometry"
        ).split(),
        "insurer": (
            "Prudentia Safehaven Aegis Trustmark Guardwell Securon Vitalis Concordia Fortuna Helvia Allshield "
            "Bonaventure Perpetua Steadfast"
        ).split(),
        "premium": range(2030, 9990),
    },
)


class Values(dict[str, str]):
    """The values of one text: each is drawn when a template first names it, and stays."""

    def __init__(self, sources: Mapping[str, Sequence[str] | range | str], rng: random.Random) -> None:
        super().__init__()
        self._sources, self._rng = sources, rng

    def __missing__(self, key: str) -> str:
        source = self._sources[key]
        value = source.format_map(self) if isinstance(source, str) else str(self._rng.choice(source))
        return self.setdefault(key, value)


@dataclass(frozen=True)
class Prompt:
    """One user turn, what it was made of, and the values that a right answer holds."""

    text: str
    kind: str
    instruction: int
    values: Mapping[str, str]


def make_prompt(templates: Templates, kind: Kind, rng: random.Random) -> Prompt:
    """A user turn of this kind: random wording, instruction and values, no two of them equal."""
    wording, instruction = rng.choice(kind.wordings), rng.randrange(len(templates.instructions))
    while True:
        values = Values(templates.values, rng)
        text = wording.format_map(values)
        wanted = {key: values[key] for key in kind.keys}
        if len(set(wanted.values())) == len(wanted):
            break
    empty = json.dumps(dict.fromkeys(kind.keys, ""))
    turn = templates.instructions[instruction].format(text=text, keys=", ".join(kind.keys), empty=empty)
    return Prompt(turn, kind.name, instruction, wanted)


def make_prompts(templates: Templates, seed: int, exclude: frozenset[str] = frozenset()) -> Iterator[Prompt]:
    """Endless prompts, a pure function of the arguments; no text is in `exclude` and none comes twice.

    They come in rounds of one prompt of each kind in random order, so that any first part is a balanced mix.
    """
    rng = random.Random(seed)
    seen = set(exclude)
    while True:
        for kind in rng.sample(templates.kinds, len(templates.kinds)):
            prompt = make_prompt(templates, kind, rng)
            if prompt.text not in seen:
                seen.add(prompt.text)
                yield prompt


def encode_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """Token ids of the user turn and the opening of the answer, exactly as the chat template renders them."""
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def generate(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers, each cut behind its end token or after `MAX_ANSWER_TOKENS`."""
    return greedy_answers(model, prompts, MAX_ANSWER_TOKENS, {model.config.eos_token_id})


def grade(prompt: Prompt, answer: str) -> str:
    """``right``, ``valid JSON`` or ``not JSON``: for the report only, all of them are kept."""
    try:
        found = json.loads(answer)
    except ValueError:
        return "not JSON"
    if not isinstance(found, dict):
        return "not JSON"
    right = {key: value.casefold() for key, value in prompt.values.items()}
    return "right" if {key: str(value).casefold() for key, value in found.items()} == right else "valid JSON"


class Outcomes:
    """What became of every prompt tried, by kind and by instruction."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def add(self, prompt: Prompt, outcome: str) -> None:
        """Count one prompt; outcomes are the grades of kept answers and the reasons for dropping others."""
        for group in ("all", f"kind {prompt.kind}", f"instruction {prompt.instruction}"):
            self._counts.setdefault(group, Counter())[outcome] += 1

    def print(self, title: str) -> None:
        """One line a group: kept of tried, shares of the kept that are valid JSON and right, reasons for dropping."""
        for group, counts in sorted(self._counts.items()):
            kept = {grade: counts[grade] for grade in ("right", "valid JSON", "not JSON")}
            num_kept = sum(kept.values())
            valid, right = (n / max(num_kept, 1) for n in (num_kept - kept["not JSON"], kept["right"]))
            dropped = {reason: n for reason, n in counts.items() if reason not in kept}
            shares = f"{valid:.0%} valid JSON, {right:.0%} right"
            print(f"{title}, {group}: {num_kept} of {counts.total()} kept, {shares}; dropped: {dropped}")


def answered(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Iterator[Prompt],
    count: int,
    batch_size: int,
    outcomes: Outcomes,
) -> Iterator[tuple[Prompt, str]]:
    """The first `count` kept pairs of prompt and answer; `outcomes` counts what happened to every prompt tried."""
    end, kept = model.config.eos_token_id, 0
    while kept < count:
        batch = list(islice(prompts, batch_size))
        encoded = [encode_prompt(tokenizer, prompt.text) for prompt in batch]
        started = time.monotonic()
        answers = generate(model, encoded)
        rate = sum(map(len, answers)) / (time.monotonic() - started)
        for prompt, prompt_ids, answer_ids in zip(batch, encoded, answers, strict=True):
            answer = tokenizer.decode(answer_ids[:-1])
            if len(tokenizer.encode(prompt.text)) > MAX_USER_TOKENS:
                outcomes.add(prompt, "prompt too long")
            elif answer_ids[-1] != end:
                outcomes.add(prompt, "does not end")
            elif not round_trips(
                tokenizer, [{"role": "user", "content": prompt.text}], answer, prompt_ids + answer_ids
            ):
                outcomes.add(prompt, "does not tokenise back")
            elif kept < count:
                outcomes.add(prompt, grade(prompt, answer))
                kept += 1
                yield prompt, answer
        print(f"{kept}/{count} kept, {rate:.0f} tok/s", flush=True)


def write(path: Path, pairs: list[tuple[Prompt, str]]) -> None:
    """One conversation a line, in the chat dialect that `paceline prepare` reads; it passes over ``kind``."""
    with path.open("w", encoding="utf-8") as file:
        for prompt, answer in pairs:
            messages = [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"kind": prompt.kind, "messages": messages}, ensure_ascii=False) + "\n")


def num_single_row_differences(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[Prompt, str]]
) -> int:
    """How many answers come out differently when a prompt is decoded alone; batching changes last bits."""
    alone = [tokenizer.decode(generate(model, [encode_prompt(tokenizer, prompt.text)])[0][:-1]) for prompt, _ in pairs]
    return sum(text != answer for text, (_, answer) in zip(alone, pairs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's training and held-out conversations.")
    parser.add_argument("--train", type=int, default=2400, help="training conversations to keep")
    parser.add_argument("--heldout", type=int, default=64, help="held-out conversations to keep; decoded one by one")
    parser.add_argument("--unseen", type=int, default=48, help="the same of kinds that training lacks")
    parser.add_argument("--verify", type=int, default=10, help="training answers to decode again one by one")
    parser.add_argument("--batch-size", type=int, default=48, help="prompts decoded together, training only")
    parser.add_argument("--threads", type=int, default=1, help="compute threads; more collapse on a busy machine")
    parser.add_argument("--device", default="cpu", help="float32 everywhere, so the answers are the CPU's up to ties")
    parser.add_argument("--target", type=Path, help="folder of the demo target; made in the cache if not given")
    parser.add_argument("--out", type=Path, default=SAMPLES)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    folder = args.target or demo_target()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval().to(args.device)
    args.out.mkdir(parents=True, exist_ok=True)

    def make(name: str, prompts: Iterator[Prompt], count: int, batch_size: int) -> list[tuple[Prompt, str]]:
        outcomes = Outcomes()
        pairs = list(answered(model, tokenizer, prompts, count, batch_size, outcomes))
        write(args.out / f"extraction_{name}.jsonl", pairs)
        outcomes.print(name)
        return pairs

    train = make("train", make_prompts(TRAINING, TRAIN_SEED), args.train, args.batch_size)
    sample = train[: args.verify]
    print(f"decoded alone, {num_single_row_differences(model, tokenizer, sample)} of {len(sample)} answers differ")
    trained = frozenset(prompt.text for prompt, _ in train)
    make("heldout", make_prompts(TRAINING, HELDOUT_SEED, exclude=trained), args.heldout, 1)
    make("unseen", make_prompts(UNSEEN, UNSEEN_SEED), args.unseen, 1)


if __name__ == "__main__":
    main()
