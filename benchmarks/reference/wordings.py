"""Requests in our own words: sums told as stories, code, texts, questions. Combined they give many different prompts.

Nothing here is taken from an evaluation set or from its templates.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
"""How sums of evaluation sets are asked for; a share of ours is asked the same way."""

NAMES = (
    "Ada", "Bruno", "Chen", "Dara", "Elif", "Farid", "Greta", "Hana", "Ivo", "Jun", "Kofi", "Lena", "Mateo", "Nadia",
    "Otto", "Priya", "Quentin", "Rosa", "Sven", "Tala", "Uma", "Viktor", "Wanda", "Yusuf", "Zora",
)  # fmt: skip
GOODS = (
    ("apples", 2), ("notebooks", 3), ("candles", 4), ("tickets", 12), ("plants", 7), ("stamps", 1), ("bottles", 2),
    ("lamps", 25), ("puzzles", 9), ("brushes", 3), ("ropes", 6), ("bricks", 1), ("chairs", 40), ("loaves", 3),
    ("postcards", 1), ("kites", 8), ("drums", 55), ("tiles", 2), ("seeds", 1), ("ribbons", 2),
)  # fmt: skip
PLACES = (
    "at the market", "in a small shop", "at the school fair", "in the library", "at the harbour", "on the farm",
    "at the station kiosk", "in the workshop", "at the museum", "in the garden centre",
)  # fmt: skip
STORIES = (
    "{a} buys {n} {g} {p} for {c} dollars each and pays with a {big} dollar note. How much change does {a} get?",
    "{a} has {n} {g}. {b} has {m} more than {a}, and {d} has twice as many as {b}. How many {g} do the three have "
    "together?",
    "{a} packs {n} {g} into boxes of {k}. How many boxes are full, and how many {g} are left over?",
    "On Monday {a} sold {n} {g} {p}, on Tuesday {m} fewer, and on Wednesday as many as on both days together. How "
    "many {g} were sold in the three days?",
    "{a} needs {k} minutes to paint one sign. How many hours and minutes does {a} need for {n} signs if {b} "
    "paints {m} of them?",
    "A crate of {g} weighs {c} kilograms empty and {big} kilograms when full. What do {n} full crates hold in all?",
    "{a} walks {n} steps to work and {m} steps more on the way home. How many steps are that in {k} days?",
    "{a} saves {c} dollars a week and {b} saves {k} dollars more. After how many weeks do they have {big} dollars "
    "together?",
    "A train leaves with {big} passengers. At each of {k} stops {c} get off and {m} get on. How many are on board "
    "then?",
    "{a} shares {big} {g} with {k} friends so that {a} keeps twice as many as each friend. How many does each "
    "friend get?",
    "The price of {n} {g} is {big} dollars. {a} gets {k} per cent off and pays a delivery fee of {c} dollars. "
    "What does {a} pay?",
    "A tank holds {big} litres. It loses {c} litres an hour and {a} fills in {k} litres every two hours. How much "
    "is in it after {n} hours if it was full at first?",
    "{a} reads {n} pages a day of a book of {big} pages, and {m} pages on Sundays. How many pages are left after "
    "{k} weeks?",
    "{a} and {b} bake {n} {g} an hour together; {a} alone bakes {k}. How long does {b} alone need for {big} {g}?",
)  # fmt: skip
MATHS = (
    "Solve for x: {k}x + {n} = {big}.", "Expand and simplify ({k}x - {m})(x + {n}).", "What is {n} per cent of {big}?",
    "Find the greatest common divisor of {big} and {n}.",
    "What is the area of a triangle with sides {k}, {m} and {c}, if there is one?",
    "A circle has the radius {k}. What are its circumference and its area?", "Simplify the fraction {n}/{big}.",
    "What is the sum of the first {n} odd numbers?", "How many ways are there to choose {k} of {n} people?",
    "What is the probability of at least one six in {k} throws of a die?",
    "Find all integers between {n} and {big} that are divisible by {k}.", "Write {big} in base {k}.",
    "What is the derivative of {k}x^{m} - {n}x?", "Find the mean and the median of {n}, {m}, {k}, {c} and {big}.",
    "The sides of a rectangle are {n} and {m}. How long is its diagonal?", "Solve the system x + y = {n}, x - y = {k}.",
    "What is the remainder of {big} divided by {k}?", "If f(x) = {k}x + {m}, what is f(f({c}))?",
)  # fmt: skip

FUNCTIONS = (
    "counts the vowels of a text", "merges two sorted lists", "returns the second largest number of a list",
    "checks whether brackets are balanced", "turns a number of seconds into hours, minutes and seconds",
    "finds the longest word of a sentence", "removes duplicates from a list and keeps the order",
    "computes the running mean of a list", "parses a line of comma separated values", "rotates a list by k places",
    "finds all pairs of a list that sum to a target", "converts a Roman numeral into a number",
    "groups words by their first letter", "flattens a nested list", "checks whether a year is a leap year",
    "computes the distance between two points", "returns the n-th row of Pascal's triangle",
    "replaces every digit of a text by its word", "reads a file and returns its longest line",
    "sorts a list of dictionaries by a key", "encodes a text by run lengths", "transposes a matrix",
    "validates an e-mail address simply", "finds the first character that occurs once",
    "computes the greatest common divisor without the math module", "splits a list into chunks of n",
    "counts how often each word occurs", "returns the intersection of two lists", "evaluates a polynomial",
    "makes a title of a sentence", "finds the missing number of a sequence from 1 to n", "reverses the words of a text",
    "checks whether a number is prime", "returns all divisors of a number", "simulates a queue with two stacks",
    "binary search in a sorted list", "inserts a node into a binary search tree", "finds the shortest path in a grid",
    "computes the edit distance of two words", "multiplies two matrices", "generates all permutations of a list",
    "checks whether two words are anagrams", "converts a temperature from Celsius to Fahrenheit",
    "formats a number with thousands separators", "finds the median of a list", "rounds a price to five cents",
    "draws a triangle of stars", "filters the even numbers of a list", "adds two binary strings",
    "caches calls of a function",
)  # fmt: skip
CODE = (
    "Write a Python function that {f}.", "Write a Python function that {f}, with type hints and a docstring.",
    "Write a Python function that {f}. Include three assert statements that test it.",
    "Complete this Python function:\n\ndef solve(value):\n    \"\"\"A function that {f}.\"\"\"\n",
    "Write a JavaScript function that {f}.", "Explain step by step how to write a function that {f}.",
    "Write a Python program that {f}, and explain its running time.",
    "Show two ways to write a function that {f} in Python.",
)  # fmt: skip

TOPICS = (
    "volcanoes", "the water cycle", "bicycles", "bread", "the moon", "honey bees", "glaciers", "chess", "railways",
    "coffee", "photosynthesis", "the human heart", "magnets", "the Silk Road", "earthquakes", "paper", "tides", "owls",
    "vaccines", "the violin", "deserts", "wind power", "the printing press", "sleep", "dinosaurs", "the stock market",
    "maps", "tea", "submarines", "coral reefs", "the Renaissance", "origami", "thunderstorms", "cheese", "robots",
    "the alphabet", "salmon", "castles", "black holes", "gardening", "the Olympic Games", "inflation", "elephants",
    "bridges", "memory", "penguins", "recycling", "the telephone", "rice", "marathons", "satellites", "wolves", "glass",
    "democracy", "mushrooms", "the compass", "hiking", "solar panels", "ballet", "rivers", "jazz", "batteries",
    "libraries", "whales", "the metric system", "forests", "algebra", "lighthouses", "cats", "soap", "kites", "cities",
    "rainbows", "clocks", "spiders", "wool", "the Internet", "potatoes", "football", "icebergs", "chocolate",
    "airships", "gravity", "songbirds", "steel", "poetry", "comets", "pottery", "horses", "the nervous system",
    "orchards", "canals", "fireworks", "camels", "statistics", "markets", "volunteering", "time zones", "beavers",
    "the theatre",
)  # fmt: skip
TASKS = (
    "Explain {t} to a ten-year-old.", "Write a short poem about {t}.", "List five facts about {t}.",
    "What are common misunderstandings about {t}?", "Write an opening paragraph of a story in which {t} matter.",
    "Give me a quiz of four questions about {t}, with answers.", "Why should anybody care about {t}?",
    "Write an e-mail to a colleague in which you propose a talk about {t}.", "Compare {t} with {u}.",
    "What would change if there had never been {t}?", "Describe the history of {t} in three sentences.",
    "Make a table of advantages and disadvantages of {t}.", "Write a dialogue of two people who disagree about {t}.",
    "Suggest ten titles for a blog post about {t}.", "What do I need to know before I learn about {t}?",
    "Write a product description for a book about {t}.", "Summarise what is known about {t} in one paragraph.",
    "Write instructions for a class project about {t}.",
    "Which jobs have to do with {t}, and what do people do in them?",
    "Write a letter to a museum and ask for material on {t}.", "Translate into French: I have read a lot about {t}.",
    "Plan a day trip for somebody who loves {t}.", "Give three arguments for and three against spending money on {t}.",
    "How are {t} and {u} connected?", "Write a speech of one minute about {t}.",
)  # fmt: skip

OPENINGS = (
    "A farmer", "A shop sells", "If a train", "In a class of", "A box holds", "A recipe for", "A tank",
    "A worker earns", "Each day,", "Every week", "There are twice as many", "The sum of", "The price of", "A baker",
    "A bus", "Half of the", "After spending", "Three friends", "A garden", "A rectangle", "My sister is",
    "My brother has", "Our team scored", "How many", "How much does", "How long will it take", "Find the value of",
    "Calculate", "Solve", "Simplify", "Evaluate", "What is the probability", "What is the remainder", "Let f(x)",
    "Suppose that", "The average of", "The area of", "Write a Python function", "Write a function that takes a list",
    "Write a function to check", "Write a function to find", "Write a function to count",
    "Write a function to convert", "Write a function to remove", "Write a program that", "Implement a class",
    "Here is my Python code:", "Why does this code", "Fix the bug in", "Write a SQL query",
    "Write a regular expression", "Given a string", "Given an array", "Given two lists", "def ", "import ",
    "Write a short story", "Write an email", "Write a blog post", "Write a poem", "Write a speech", "Write a review",
    "Draft a letter", "Compose a", "Summarize", "Rewrite the following", "Translate", "Proofread",
    "Edit this paragraph:", "Explain how", "Explain why", "Explain the difference between", "Describe", "Compare",
    "Discuss", "Analyze", "Argue", "Imagine you are", "Pretend to be", "Act as a", "You are a", "Give me advice",
    "Suggest", "Recommend", "Plan", "List", "Create a table", "Make a schedule", "Design", "Brainstorm",
    "Come up with", "Name five", "Tell me about", "What are the main causes", "What are the benefits",
    "What happens when", "What would happen if", "Who was", "When did", "Where does", "Which of these",
    "Is it true that", "Can you", "Could you", "Should I", "Do you think", "I have", "I want to", "I am trying to",
    "I need help", "I'm planning", "My boss", "My teacher", "For my homework", "Classify", "Extract",
    "Answer the following question:", "Read the passage", "Here is a table:", "Given the text",
)  # fmt: skip
"""First words of a user, whose question the target goes on with."""


def sums(random_: random.Random) -> Iterator[str]:
    """Stories and short problems with numbers, for ever; half of them ask for steps and a box."""
    while True:
        good, price = random_.choice(GOODS)
        a, b, d = random_.sample(NAMES, 3)
        numbers = {
            "n": random_.randint(6, 96), "m": random_.randint(2, 19), "k": random_.randint(2, 12),
            "c": price + random_.randint(0, 9), "big": 5 * random_.randint(20, 200),
        }  # fmt: skip
        text = random_.choice(STORIES if random_.random() < 0.7 else MATHS)
        text = text.format(a=a, b=b, d=d, g=good, p=random_.choice(PLACES), **numbers)
        yield f"{text}\n{STEPS}" if random_.random() < 0.5 else text


def code(random_: random.Random) -> Iterator[str]:
    """Programs to write, for ever: they repeat after some hundreds."""
    while True:
        yield random_.choice(CODE).format(f=random_.choice(FUNCTIONS))


def texts(random_: random.Random) -> Iterator[str]:
    """Things to write and to explain, for ever: they repeat after some thousands."""
    while True:
        topic, other = random_.sample(TOPICS, 2)
        yield random_.choice(TASKS).format(t=topic, u=other)
