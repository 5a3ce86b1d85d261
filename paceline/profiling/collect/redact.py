"""Commands without their secrets, for a report that others will read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from paceline.errors import printable

COMMAND_CHARACTERS = 200
"""Of a command in a report, at most."""

_MASK = "***"
_SECRET = re.compile(
    r"key|token|secret|passw|passphrase|passcode|pwd|credential|auth|cookie|dsn|bearer|signature|private|jwt|session|"
    r"connection.?string|webhook|(?<![a-z])(?:sig|pw|pat)(?![a-z])",
    re.IGNORECASE,
)
_HARMLESS = re.compile(r"tokeni[sz][a-z]*|authors?(?![a-z])|keyboard|keyword|keyframe|keypoint|monkey", re.IGNORECASE)
_COUNT = re.compile(
    r"(?:^|[^a-z])(?:num|max|min|per|n|count|size|len|length|heads?|dim|tokens)(?:$|[^a-z])", re.IGNORECASE
)
_NUMBER = re.compile(r"\d{1,9}(?:\.\d{1,4})?(?:[kKmMgG]|[eE]\d{1,2})?")
_NAME = re.compile(r"[\"']?[\w.\-+~@/\[\]]*")
_OPTION = re.compile(r"-+[^\s\d=\-]")
_CODE_OPTION = re.compile(r"-[A-Za-z]{0,3}c")
_INNER_NAME = re.compile(r"(?<![\w.\-])([\w.\-]+)[\"']?\s*[=:]\s*")
_INNER_VALUE = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s,;&}\]]+")
_SCHEME_NAME = r"(?:bearer|basic|digest|token|apikey)"
_SCHEME = re.compile(rf"\b({_SCHEME_NAME})\s+\S+", re.IGNORECASE)
_URL_USER = re.compile(r"(\w://)(?:[^\s/?#@:]*:[^\s]*|[^\s/?#@]*)@")
_KNOWN_TOKENS = re.compile(
    r"(?:hf_|api_org_|sk-|sk_|pk_|rk_|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|nvapi-|AIza|pypi-|npm_|dop_v1_|wandb_v1_)"
    r"[\w\-.]{6,}|(?:AKIA|ASIA)[0-9A-Z]{8,}|eyJ[\w\-]{8,}[\w\-.]*"
)
_LONG = re.compile(r"[A-Za-z0-9+/_\-]{32,}={0,2}")
_PATH = re.compile(r"(?<![^\s=,:;'\"(\[])(?:(?:~|\.{1,2})?/)?(?:[^\s/=,:;'\"@]+/)+([^\s/=,:;'\"@]+/[^\s/=,:;'\"@]+/?)")


def redacted(argv: Sequence[str]) -> str:
    """A command as a report shows it: secrets masked as ``***``, code after ``-c`` left out, folders shortened.

    It rather masks too much. A secret that neither its option's name nor its own shape gives away stays.
    """
    words = [word[:1024] for word in argv[:64]]
    if len(words) == 1 and len(words[0].split()) > 1:  # a title that the process gave itself
        words = words[0].split()
    text = " ".join(_quoted(word) for word in _masked(words))
    return text if len(text) <= COMMAND_CHARACTERS else text[: COMMAND_CHARACTERS - 3] + "..."


def _masked(words: Iterable[str]) -> list[str]:
    """Each argument as it is shown; what follows an option with a secret's name is its value."""
    shown: list[str] = []
    before, name, is_first, is_code = "", "", False, False
    for word in words:
        if is_code:
            shown.append("...")
            is_code, name = False, ""
        elif name and (is_first or not _OPTION.match(word)):
            hides = _hides(name, word)
            shown.append(_MASK if hides else _shown(word))
            is_code = bool(_CODE_OPTION.fullmatch(word))
            if hides and is_first and (_bare_name(word) or re.fullmatch(_SCHEME_NAME, word, re.IGNORECASE)):
                name = word  # an option without a value came before it, or a scheme comes before its secret
            elif hides and re.search(r"s\W*$", name, re.IGNORECASE):
                is_first = False  # a list of them
            else:
                name = ""
        elif before in ("-u", "--user", "--proxy-user") and ":" in word:
            shown.append(_MASK)
        elif re.match(r"-c.", word):
            shown.append("-c...")
        else:
            shown.append(_shown(word))
            is_code = bool(_CODE_OPTION.fullmatch(word))
            name, is_first = _bare_name(word), True
        before = word
    return shown


def _bare_name(word: str) -> str:
    """The name of a secret whose value is the next argument: ``--api-key``, ``token:``, ``Bearer``; else empty."""
    if word.lower() == "bearer":
        return word
    bare = re.fullmatch(r"[^\s=:]+[=:]", word) or (_OPTION.match(word) and not re.search(r"[=:\s]", word))
    return word if bare and _names_secret(word) else ""


def _shown(word: str, depth: int = 0) -> str:
    """One argument, with what is secret in it masked."""
    for sign in ("=", ":"):
        name, found, value = word.partition(sign)
        if not found or not _NAME.fullmatch(name.strip()):
            continue
        if _names_secret(name):
            return f"{_plain(name)}{sign}{_MASK}" if _hides(name, value) else _plain(word)
        if sign == "=" and depth < 8:
            return f"{_plain(name)}={_shown(value, depth + 1)}"
    word = _inner(_SCHEME.sub(rf"\1 {_MASK}", word))
    parts = word.split()
    return " ".join(_masked(parts)) if len(parts) > 1 else _plain(word)


def _inner(text: str) -> str:
    """Text with the values of secrets masked that stand in its midst, as in JSON or in a query of a URL."""
    parts, at, shown = [], 0, 0
    while match := _INNER_NAME.search(text, at):
        at = match.end()
        value = _INNER_VALUE.match(text, at)
        if value and _names_secret(match[1]) and _hides(match[1], value[0]):
            parts += [text[shown:at], _MASK]
            at = shown = value.end()
    return "".join([*parts, text[shown:]])


def _plain(text: str) -> str:
    """Text in which only shapes are looked for."""
    text = _URL_USER.sub(rf"\1{_MASK}@", text)
    text = _LONG.sub(_without_keys, _KNOWN_TOKENS.sub(_MASK, text))
    return one_line(_PATH.sub(r".../\1", text))


def _names_secret(name: str) -> bool:
    return bool(_SECRET.search(_HARMLESS.sub("", name)))


def _hides(name: str, value: str) -> bool:
    """Whether the value of a secret's name is masked: all but counts, such as ``--max-new-tokens 128``."""
    return not (_COUNT.search(name) and _NUMBER.fullmatch(value.strip()))


def _without_keys(match: re.Match[str]) -> str:
    """A long word, masked if it is a key; of a path, the parts that are."""
    if _changes_often(match[0]):
        return _MASK
    return "/".join(_MASK if _is_key(part) else part for part in match[0].split("/"))


def _is_key(text: str) -> bool:
    if len(text) < 32:
        return False
    if re.fullmatch(r"[0-9a-fA-F\-]+", text) or _changes_often(text):
        return True
    return any(len(run) >= 32 and re.search(r"\d", run) for run in re.split(r"[+_\-=]", text))


def _changes_often(text: str) -> bool:
    """Between small letters, capitals and digits: keys do at most of their characters, names and paths do not."""
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in text if c.isalnum()]
    changes = sum(a != b for a, b in zip(kinds, kinds[1:], strict=False))
    return changes >= 0.4 * max(1, len(kinds) - 1)


def _quoted(word: str) -> str:
    return f'"{word}"' if not word or " " in word else word


def one_line(text: str) -> str:
    """Text that neither steers a terminal nor leaves its line."""
    return printable(text).replace("\n", "\\n")
