"""The demo's conversations are what `scripts/make_demo_data.py` makes, and `extraction_unseen` is new to training."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import islice

import pytest
from transformers import AutoTokenizer

from paceline.data.dialects import Conversation, parse
from paceline.data.inputs import Input, open_inputs, read_records
from paceline.data.reading import Record
from paceline.files import default_cache_dir
from paceline.models.assets import FOLDER_NAME, is_complete
from scripts.make_demo_data import (
    HELDOUT_SEED,
    MAX_ANSWER_TOKENS,
    MAX_USER_TOKENS,
    SAMPLES,
    TRAIN_SEED,
    TRAINING,
    UNSEEN,
    UNSEEN_SEED,
    Prompt,
    Templates,
    grade,
    make_prompts,
)

SIZES = {"train": 2400, "heldout": 64, "unseen": 48}
SOURCES = {"train": (TRAINING, TRAIN_SEED), "heldout": (TRAINING, HELDOUT_SEED), "unseen": (UNSEEN, UNSEEN_SEED)}


def records(name: str) -> list[Record]:
    """The lines of a file."""
    return list(read_records(open_inputs([Input(str(SAMPLES / f"extraction_{name}.jsonl"))])))


@cache
def stored(name: str) -> list[tuple[str, str, str]]:
    """Kind, prompt and answer of each line."""
    lines = [record.decode() for record in records(name)]
    return [(line["kind"], *(message["content"] for message in line["messages"])) for line in lines]


def words(templates: Templates) -> set[str]:
    """Every word that a value can have."""
    texts = [
        re.sub(r"{\w+}", " ", source) if isinstance(source, str) else " ".join(map(str, source))
        for source in templates.values.values()
    ]
    return set(" ".join(texts).casefold().split())


def runs(templates: Templates, length: int) -> set[tuple[str, ...]]:
    """Every run of `length` words or fields in the wordings and instructions."""
    texts = [*templates.instructions, *(wording for kind in templates.kinds for wording in kind.wordings)]
    split = [re.findall(r"{\w+}|\w+", text.casefold()) for text in texts]
    return {tuple(text[i : i + length]) for text in split for i in range(len(text) - length + 1)}


@pytest.mark.parametrize("name", SIZES)
def test_lines_are_conversations_of_one_question_and_answer(name: str) -> None:
    """`paceline prepare` reads every line, the key `kind` beside the messages included."""
    lines = records(name)
    assert len(lines) == SIZES[name]
    for line in lines:
        conversation = parse(line.decode())
        assert isinstance(conversation, Conversation)
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


@pytest.mark.parametrize("name", SIZES)
def test_prompts_come_from_the_script(name: str) -> None:
    """A file holds the script's prompts in their order, less those that were dropped."""
    trained = frozenset(prompt for _, prompt, _ in stored("train"))
    prompts = make_prompts(*SOURCES[name], exclude=trained if name == "heldout" else frozenset())
    made = iter([(prompt.kind, prompt.text) for prompt in islice(prompts, 2 * SIZES[name])])
    assert all((kind, prompt) in made for kind, prompt, _ in stored(name))  # `in` moves on behind what it finds


def test_no_prompt_comes_twice() -> None:
    """Within a file and across the three, every prompt is another one."""
    prompts = [prompt for name in SIZES for _, prompt, _ in stored(name)]
    assert len(set(prompts)) == sum(SIZES.values())


@pytest.mark.parametrize("count", [100, 400, 2400])
def test_any_first_part_of_training_is_a_balanced_mix(count: int) -> None:
    """No kind has more than twice its even share of the first lines, or less than a third of it."""
    counts = Counter(kind for kind, _, _ in stored("train")[:count])
    share = count / len(TRAINING.kinds)
    assert all(share / 3 <= counts[kind.name] <= 2 * share for kind in TRAINING.kinds), counts


def test_unseen_shares_nothing_with_training() -> None:
    """Other kinds, keys (but for the name), values and instructions; no four words of a template in a row."""
    training, unseen = ({key for kind in templates.kinds for key in kind.keys} for templates in (TRAINING, UNSEEN))
    assert training & unseen == {"name"}
    assert not {kind.name for kind in TRAINING.kinds} & {kind.name for kind in UNSEEN.kinds}
    assert not set(TRAINING.instructions) & set(UNSEEN.instructions)
    assert not runs(TRAINING, 4) & runs(UNSEEN, 4)
    assert not words(TRAINING) & words(UNSEEN)


@pytest.mark.parametrize("templates", [TRAINING, UNSEEN])
def test_wordings_hold_each_key_once(templates: Templates) -> None:
    """A wording names its kind's keys and nothing else, and no list draws a value more often than another."""
    for kind in templates.kinds:
        for wording in kind.wordings:
            assert sorted(re.findall(r"{(\w+)}", wording)) == sorted(kind.keys), wording
    for key, source in templates.values.items():
        assert isinstance(source, str) or len(set(source)) == len(source), key


def test_prompts_are_a_function_of_the_seed() -> None:
    """The same seed gives the same prompts, another one others, and excluded ones do not come."""
    first, again, other = (list(islice(make_prompts(TRAINING, seed), 50)) for seed in (5, 5, 6))
    assert first == again and first != other
    some = frozenset(prompt.text for prompt in first[::2])
    assert not some & {prompt.text for prompt in islice(make_prompts(TRAINING, 5, exclude=some), 50)}


def test_grades() -> None:
    """Right is every key with its value, whatever its case and type; other JSON values than objects are no answer."""
    prompt = Prompt("", "person", 0, {"name": "Ada Dahl", "age": "30"})
    assert grade(prompt, '{"age": 30, "name": "ada Dahl"}') == "right"
    assert grade(prompt, '{"name": "Ada Dahl"}') == "valid JSON"
    assert grade(prompt, '["Ada Dahl", 30]') == grade(prompt, "Ada Dahl, 30") == "not JSON"


@pytest.mark.skipif(not is_complete(default_cache_dir() / FOLDER_NAME), reason="the demo target is not in the cache")
@pytest.mark.parametrize("name", SIZES)
def test_turns_are_short(name: str) -> None:
    """No user turn has more than `MAX_USER_TOKENS`, no answer more than `MAX_ANSWER_TOKENS` with its end token."""
    tokenizer = AutoTokenizer.from_pretrained(default_cache_dir() / FOLDER_NAME)
    _, prompts, answers = zip(*stored(name), strict=True)
    assert max(map(len, tokenizer(list(prompts))["input_ids"])) <= MAX_USER_TOKENS
    assert max(map(len, tokenizer(list(answers))["input_ids"])) + 1 <= MAX_ANSWER_TOKENS
