"""`samovar pack` and `samovar plan` are tools of the engine in processes of their own."""

import pytest

from services.cli.__main__ import main


def test_the_child_gets_the_options_and_gives_the_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "--recipe", "int9", "/nowhere", "-o", "out"]) == 2
    assert "samovar pack: recipe 'int9' is neither a TOML file nor one of" in capfd.readouterr().err


def test_a_plan_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--vram", "much"]) == 2
    assert "samovar plan: SAMOVAR_VRAM='much': write a size" in capfd.readouterr().err


def test_other_commands_take_no_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["version", "--recipe", "fp8"])
    assert "unrecognized arguments: --recipe fp8" in capsys.readouterr().err
