"""A small prepared data folder, made of this Python's library, with the shipped tokenizer."""

import sysconfig
from pathlib import Path

from tools.train.data.prepare import prepare

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "samovar-tiny"
LETTERS = "bcdfghklmnprst"
VOWELS = "aeiou"


def write_corpus(folder: Path) -> tuple[Path, Path]:
    """Python and English folders with text in both splits."""
    python, english = folder / "python", folder / "english"
    for path in (python, english):
        path.mkdir(parents=True)
    library = Path(sysconfig.get_path("stdlib"))
    for name in (
        "argparse",
        "ast",
        "calendar",
        "configparser",
        "csv",
        "datetime",
        "difflib",
        "enum",
        "inspect",
        "typing",
    ):
        source = library / f"{name}.py"
        (python / source.name).write_text(source.read_text())
    words = [a + b + c + d for a in LETTERS for b in VOWELS for c in "lnrst" for d in ("do", "me", "ba")]
    for number in range(120):
        lines = [
            " ".join(words[(number * 37 + line * 11 + i * i) % len(words)] for i in range(12)) for line in range(70)
        ]
        (english / f"page{number:03}.md").write_text(f"# Page {number}\n\n" + ".\n".join(lines) + ".\n")
        # enough files that some of them fall into the held-out part
        (python / f"made{number:03}.py").write_text(
            "\n\n\n".join(f"def {line.split()[0]}_{number}(value):\n    return value + {number}" for line in lines)
        )
    return python, english


def make_data(folder: Path, out: Path) -> Path:
    python, english = write_corpus(folder)
    prepare([python], [english], out, SHIPPED / "tokenizer.json", 4096, 2_000_000)
    return out
