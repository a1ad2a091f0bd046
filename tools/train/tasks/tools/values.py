"""What people say as the values of parameters, and what then stands in the call."""

import json
from collections.abc import Callable
from typing import NamedTuple

from tools.train.tasks.source import Source
from tools.train.tasks.wording import listed

CITIES = listed(
    "Paris,London,Berlin,Madrid,Rome,Vienna,Prague,Warsaw,Oslo,Helsinki,Lisbon,Dublin,Athens,Cairo,Nairobi,"
    "Lagos,Tokyo,Osaka,Seoul,Beijing,Delhi,Mumbai,Bangkok,Jakarta,Sydney,Toronto,Montreal,Chicago,Boston,"
    "Seattle,Denver,Austin,Lima,Bogota,Santiago,Havana,Kyiv,Zurich,Geneva,Munich,Hamburg,Milan,Naples,Porto,"
    "Lyon,Krakow,Budapest,Istanbul,New York,San Francisco,Buenos Aires,Cape Town,Hong Kong,Mexico City,"
    "Tel Aviv",
    ",",
)
NAMES = listed(
    "Anna Ben Clara David Emma Felix Grace Hugo Ida Jonas Karin Leo Maria Nina Oscar Paula Quentin Rosa Samuel "
    "Tara Uwe Vera Walter Yusuf Zoe Alice Bob Carol Erik Frank"
)
LANGUAGES = listed(
    "English French German Spanish Italian Dutch Polish Swedish Greek Turkish Arabic Hindi Japanese Korean "
    "Chinese Russian"
)
NUMBER_WORDS = listed("zero one two three four five six seven eight nine ten eleven twelve")
TOP_FOLDERS = ("src", "lib", "tests", "docs", "app", "home", "data", "tmp", "etc", "config", "scripts", "packages")
EXTENSIONS = listed(
    ".py .py .py .txt .md .json .js .ts .tsx .go .rs .c .h .cpp .java .rb .sh .yaml .toml .html .css .sql .csv .log"
)
WHOLE_FILES = ("README.md", "Makefile", "main.py", "setup.py", "package.json", "index.html", "Dockerfile", "go.mod")
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CHF", "SEK", "PLN", "INR", "CAD")


class Value(NamedTuple):
    written: str
    """As the request says it."""
    argument: str
    """As the call carries it. Strings: the same text."""


Draw = Callable[[Source], Value]


def same(text: str) -> Value:
    return Value(text, text)


def folder(source: Source) -> str:
    rng = source.rng
    parts = [rng.choice(TOP_FOLDERS) if source.chance(0.6) else path_word(source)]
    parts += [path_word(source) for _ in range(rng.choices((0, 1, 2), (40, 40, 20))[0])]
    return rng.choice(("/", "", "", "./", "~/")) + "/".join(parts)


def path_word(source: Source) -> str:
    rng = source.rng
    word = source.word() if source.chance(0.8) else source.pseudo_word()
    if source.chance(0.25):
        word += rng.choice("_-_") + source.word()
    return word + (str(rng.randint(1, 20)) if source.chance(0.06) else "")


def file_path(source: Source) -> Value:
    rng = source.rng
    name = rng.choice(WHOLE_FILES) if source.chance(0.15) else path_word(source) + rng.choice(EXTENSIONS)
    return same(name if source.chance(0.25) else f"{folder(source)}/{name}")


def folder_path(source: Source) -> Value:
    return same("." if source.chance(0.05) else folder(source) + ("/" if source.chance(0.25) else ""))


def command(source: Source) -> Value:
    rng = source.rng
    path = file_path(source).written
    word = source.word()
    return same(
        rng.choice(
            (
                "ls -la",
                f"ls {folder(source)}",
                "git status",
                f"git log --oneline -n {rng.randint(1, 30)}",
                f"git checkout -b {word}",
                f'git commit -m "{source.words(2, 5)}"',
                f"python {path}",
                f"pytest {path} -q",
                f"pytest -k {word}",
                f"cat {path}",
                f"head -n {rng.randint(1, 99)} {path}",
                f"grep -rn {word} {folder(source)}",
                f"rm -rf {folder(source)}",
                f"mkdir -p {folder(source)}",
                f"make {word}",
                f"npm run {word}",
                f"npm install {word}",
                f"pip install {word}",
                f"cargo test {word}",
                f"docker compose up {word}",
                f"cd {folder(source)} && make {word}",
                f"wc -l {path}",
                f"echo {source.words(1, 3)}",
                f"curl -s {url(source).written}",
                f"ps aux | grep {word}",
                f"find . -name '*{rng.choice(EXTENSIONS)}' | sort",
            )
        )
    )


def pattern(source: Source) -> Value:
    """What one searches for in code."""
    rng = source.rng
    word = source.word()
    form = (
        word,
        word,
        word.upper(),
        f"{word}_{source.word()}",
        f"def {word}",
        f"class {word.capitalize()}",
        f"import {word}",
        "TODO",
        "FIXME",
        rf"{word}\(.*\)",
        rf"\b{word}\b",
        rf"^def \w+_{word}",
        source.words(2, 3),
        f"{word} = {rng.randint(0, 99)}",
        f"{word}.{source.word()}(",
    )
    return same(rng.choice(form))


def glob_pattern(source: Source) -> Value:
    extension = source.rng.choice(EXTENSIONS)
    word = source.word()
    form = (
        f"*{extension}",
        f"**/*{extension}",
        f"{folder(source)}/**/*{extension}",
        f"{word}*",
        f"**/{word}{extension}",
        f"{folder(source)}/*{extension}",
        f"test_*{extension}",
    )
    return same(source.rng.choice(form))


def url(source: Source) -> Value:
    rng = source.rng
    host = (source.word() if source.chance(0.6) else source.pseudo_word()) + rng.choice((".com", ".org", ".io", ".dev"))
    host = rng.choice(("", "", "www.", "docs.", "api.")) + host
    path = "".join("/" + source.word() for _ in range(rng.choices((0, 1, 2, 3), (25, 35, 25, 15))[0]))
    end = rng.choice(("", "", ".html", f"?{source.word()}={source.word()}", f"?page={rng.randint(1, 40)}"))
    return same(f"{rng.choice(('https', 'https', 'http'))}://{host}{path}{end if path else ''}")


def code_line(source: Source) -> Value:
    rng = source.rng
    a, b, c = source.word(), source.word(), source.word()
    n = rng.randint(0, 999)
    form = (
        f"{a} = {n}",
        f"{a} = {b}({c})",
        f"return {a} + {b}",
        f"def {a}({b}):",
        f"def {a}({b}, {c}={n}):",
        f"import {a}",
        f"from {a} import {b}",
        f"if {a} == {n}:",
        f"for {a} in {b}:",
        f"{a}.{b}({c})",
        f'{a} = "{b} {c}"',
        f"raise ValueError({a})",
        f"print({a}, {b})",
        f"{a}[{n}] = {b}",
        f"const {a} = {n};",
        f"let {a} = await {b}({c});",
        f"{a}: {b}",
        f"self.{a} = {b}",
    )
    return same(rng.choice(form))


def code_block(source: Source) -> Value:
    """Several lines."""
    form = source.rng.random()
    if form < 0.35:
        name, argument = source.word(), source.word()
        body = [code_line(source).written for _ in range(source.rng.randint(1, 4))]
        return same(f"def {name}({argument}):\n" + "\n".join("    " + line for line in body))
    if form < 0.6:
        return same("\n".join(code_line(source).written for _ in range(source.rng.randint(2, 5))))
    if form < 0.8:
        return same("\n".join("- " + source.words(1, 5) for _ in range(source.rng.randint(2, 5))))
    kind = "python" if form < 0.92 else "english"
    return same(source.passage_text(kind, source.rng.randint(15, 90)))


def sentence(source: Source) -> Value:
    text = source.words(2, 9)
    return same(text.capitalize() if source.chance(0.4) else text)


def topic(source: Source) -> Value:
    return same(source.words(1, 4))


def city(source: Source) -> Value:
    return same(source.rng.choice(CITIES) if source.chance(0.6) else source.pseudo_word().capitalize())


def person(source: Source) -> Value:
    name = source.rng.choice(NAMES) if source.chance(0.6) else source.pseudo_word().capitalize()
    return same(f"{name} {source.pseudo_word().capitalize()}" if source.chance(0.3) else name)


def email(source: Source) -> Value:
    name = source.rng.choice(NAMES).lower() if source.chance(0.5) else source.word()
    return same(f"{name}@{source.word() if source.chance(0.5) else source.pseudo_word()}.com")


def date(source: Source) -> Value:
    rng = source.rng
    return same(f"{rng.randint(2015, 2035)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}")


def time_of_day(source: Source) -> Value:
    return same(f"{source.rng.randint(0, 23):02}:{source.rng.randrange(0, 60, 5):02}")


def language(source: Source) -> Value:
    return same(source.rng.choice(LANGUAGES))


def currency(source: Source) -> Value:
    return same(source.rng.choice(CURRENCIES))


def expression(source: Source) -> Value:
    rng = source.rng
    parts = [str(rng.randint(1, 999))]
    for _ in range(rng.randint(1, 3)):
        parts += [rng.choice("+-*/"), str(rng.randint(1, 999))]
    return same(" ".join(parts))


def identity(source: Source) -> Value:
    return same(source.code())


def label(source: Source) -> Value:
    return same(source.word() if source.chance(0.7) else source.pseudo_word())


def branch(source: Source) -> Value:
    prefix = source.rng.choice(("", "", "feature/", "fix/"))
    return same(f"{prefix}{source.word()}" + (f"-{source.word()}" if source.chance(0.5) else ""))


def small_number(source: Source) -> Value:
    """2 to 12, sometimes written as a word."""
    number = source.rng.randint(2, 12)
    return Value(NUMBER_WORDS[number] if source.chance(0.25) else str(number), str(number))


def number(source: Source) -> Value:
    return same(str(source.rng.randint(1, 10 ** source.rng.randint(1, 4))))


def word_items(source: Source) -> Value:
    """Two to four short items; the call carries a JSON array."""
    items = [source.words(1, 3) for _ in range(source.rng.randint(2, 4))]
    return Value(", ".join(items), json.dumps(items))
