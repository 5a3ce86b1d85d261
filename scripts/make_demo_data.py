"""Make the demo's conversations: short texts turned into JSON, answered by the demo target itself.

Prompts are ours: three kinds of text, two wordings each, three instructions, filled from the lists below by a seeded
generator. Answers are the target's greedy ones in float32. A drafter learns what *its* target says, so they are kept
right or wrong; dropped and counted are answers that do not end within `MAX_ANSWER_TOKENS` (loops) and those whose text
does not tokenise back to the generated ids.

    python scripts/make_demo_data.py --device cuda    # writes paceline/data/samples/extraction_*.jsonl

A CPU does it too, at 60 tokens a second on two quiet cores (67,000 tokens are kept).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from paceline.models.assets import demo_target

SAMPLES = Path(__file__).parents[1] / "paceline" / "data" / "samples"
TRAIN_SEED, HELDOUT_SEED = 1, 2
MAX_PROMPT_TOKENS = 120
MAX_ANSWER_TOKENS = 160
"""End token included."""

FIRST_NAMES = (
    "Ada Bruno Carla Dario Elena Felix Greta Hugo Irene Jonas Klara Leon Mara Nils Olga Pedro Rosa Simon Tessa Viktor "
    "Wanda Yusuf Amina Boris Chloe Emil Fatima Gustav Hanna Ivan Julia Kofi Lena Marco Nadia Oscar Paula Rahul Sofia "
    "Tomas"
).split()
LAST_NAMES = (
    "Abbott Becker Castillo Dahl Eriksen Fontaine Greco Hartmann Ibsen Jansen Keller Lindberg Moreau Novak Okafor "
    "Petrov Quinn Rossi Schmidt Tanaka Ueda Vargas Weber Young Zeller Bianchi Cohen Duarte Engel Fischer Gupta Horvat"
).split()
CITIES = (
    "Lisbon Hamburg Toronto Nairobi Oslo Prague Madrid Vienna Chicago Osaka Dublin Athens Geneva Boston Turin Lima "
    "Warsaw Cairo Sydney Porto"
).split()
JOBS = "teacher nurse pilot baker lawyer dentist doctor engineer writer musician photographer journalist".split()
HOBBIES = "chess tennis hiking cooking reading painting cycling swimming gardening football".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


@dataclass(frozen=True)
class Kind:
    """One kind of text: its keys, and wordings that contain each of them once."""

    keys: tuple[str, ...]
    wordings: tuple[str, ...]


KINDS = (
    Kind(
        keys=("name", "age", "city", "job", "hobby"),
        wordings=(
            "{name} is {age} years old, lives in {city}, works as a {job} and likes {hobby}.",
            "My name is {name}. I am {age} and live in {city}. My job is {job}, my hobby is {hobby}.",
        ),
    ),
    Kind(
        keys=("name", "day", "time", "city"),
        wordings=(
            "{name} will arrive in {city} on {day} at {time}.",
            "Please meet {name} on {day} at {time}, in the city of {city}.",
        ),
    ),
    Kind(
        keys=("name", "email", "phone", "city"),
        wordings=(
            "You can reach {name} in {city} by email at {email} or by phone at {phone}.",
            "{name}, {city}. Email: {email}. Phone: {phone}.",
        ),
    ),
)


def make_prompt(rng: random.Random) -> str:
    """One user turn: a random kind, wording and instruction with random values."""
    kind = rng.choice(KINDS)
    first, last = rng.choice(FIRST_NAMES), rng.choice(LAST_NAMES)
    text = rng.choice(kind.wordings).format(
        name=f"{first} {last}",
        age=rng.randint(19, 69),
        city=rng.choice(CITIES),
        job=rng.choice(JOBS),
        hobby=rng.choice(HOBBIES),
        day=rng.choice(DAYS),
        time=f"{rng.randint(7, 19)}:{rng.choice(('00', '15', '30', '45'))}",
        email=f"{first}.{last}@example.com".lower(),
        phone=f"555-01{rng.randint(10, 99)}",
    )
    keys = ", ".join(kind.keys)
    empty = json.dumps(dict.fromkeys(kind.keys, ""))
    instructions = (
        f"Extract {keys} from the text as a JSON object.\n\nText: {text}",
        f"Text: {text}\n\nTurn this text into JSON with the keys {keys}. Answer with the JSON only.",
        f"Text: {text}\n\nFill in this JSON: {empty}",
    )
    return rng.choice(instructions)


def make_prompts(seed: int, exclude: frozenset[str] = frozenset()) -> Iterator[str]:
    """Endless prompts, a pure function of the arguments; none is in `exclude` and none comes twice."""
    rng = random.Random(seed)
    seen = set(exclude)
    while True:
        prompt = make_prompt(rng)
        if prompt not in seen:
            seen.add(prompt)
            yield prompt


def encode_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """Token ids of the user turn and the opening of the answer, exactly as the chat template renders them."""
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@torch.inference_mode()
def generate(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers to a left-padded batch, each cut behind its end token or after `MAX_ANSWER_TOKENS`."""
    end, width = model.config.eos_token_id, max(map(len, prompts))
    input_ids = torch.tensor([[end] * (width - len(ids)) + ids for ids in prompts])
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    input_ids, attention_mask = input_ids.to(model.device), attention_mask.to(model.device)
    output = model.generate(input_ids, attention_mask=attention_mask, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    answers = output[:, width:].tolist()
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in answers]


def round_trips(tokenizer: PreTrainedTokenizerFast, prompt: str, answer: str, expected: list[int]) -> bool:
    """Whether the stored conversation tokenises to `expected` (prompt, answer, end token), a line break behind it."""
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    return ids[: len(expected)] == expected and tokenizer.decode(ids[len(expected) :]) == "\n"


def answered(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Iterator[str],
    count: int,
    batch_size: int,
    outcome: Counter[str],
) -> Iterator[tuple[str, str]]:
    """The first `count` kept (prompt, answer) pairs; `outcome` counts what happened to every prompt tried."""
    end, kept = model.config.eos_token_id, 0
    while kept < count:
        batch = list(islice(prompts, batch_size))
        encoded = [encode_prompt(tokenizer, prompt) for prompt in batch]
        started = time.monotonic()
        answers = generate(model, encoded)
        rate = sum(map(len, answers)) / (time.monotonic() - started)
        for prompt, prompt_ids, answer_ids in zip(batch, encoded, answers, strict=True):
            answer = tokenizer.decode(answer_ids[:-1])
            if len(prompt_ids) > MAX_PROMPT_TOKENS:
                outcome["prompt too long"] += 1
            elif answer_ids[-1] != end:
                outcome["does not end"] += 1
            elif not round_trips(tokenizer, prompt, answer, prompt_ids + answer_ids):
                outcome["does not tokenise back"] += 1
            elif kept < count:
                outcome["kept"] += 1
                outcome["answer tokens kept"] += len(answer_ids)
                kept += 1
                yield prompt, answer
        print(f"{kept}/{count} kept, {rate:.0f} tok/s", flush=True)


def write(path: Path, pairs: list[tuple[str, str]]) -> None:
    """One conversation a line, in the chat dialect that `paceline prepare` reads."""
    with path.open("w", encoding="utf-8") as file:
        for prompt, answer in pairs:
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def num_single_row_differences(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]
) -> int:
    """How many answers come out differently when a prompt is decoded alone; batching changes last bits."""
    decoded = [tokenizer.decode(generate(model, [encode_prompt(tokenizer, prompt)])[0][:-1]) for prompt, _ in pairs]
    return sum(text != answer for text, (_, answer) in zip(decoded, pairs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's training and held-out conversations.")
    parser.add_argument("--train", type=int, default=1200, help="training conversations to keep")
    parser.add_argument("--heldout", type=int, default=64, help="held-out conversations to keep; decoded one by one")
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

    outcome: Counter[str] = Counter()
    train = list(answered(model, tokenizer, make_prompts(TRAIN_SEED), args.train, args.batch_size, outcome))
    write(args.out / "extraction_train.jsonl", train)
    print("train:", dict(outcome))
    sample = train[: args.verify]
    print(f"decoded alone, {num_single_row_differences(model, tokenizer, sample)} of {len(sample)} answers differ")

    outcome.clear()
    prompts = make_prompts(HELDOUT_SEED, exclude=frozenset(prompt for prompt, _ in train))
    write(args.out / "extraction_heldout.jsonl", list(answered(model, tokenizer, prompts, args.heldout, 1, outcome)))
    print("heldout:", dict(outcome))


if __name__ == "__main__":
    main()
