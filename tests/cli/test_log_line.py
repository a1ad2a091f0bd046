"""services.cli.log_line: how serious a line is."""

import logging

import pytest

from services.cli import log_line

OURS = "2026-11-30 12:00:00,123 {:<7} engine services.engine: {}"


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"])
def test_format_of_our_services(level: str):
    assert log_line.read("engine", OURS.format(level, "text"), None).level == logging.getLevelNamesMapping()[level]


@pytest.mark.parametrize(
    ("mark", "level"),
    [("DBG", logging.DEBUG), ("INF", logging.INFO), ("WRN", logging.WARNING), ("ERR", 40), ("FTL", 50)],
)
def test_format_of_nats(mark: str, level: int):
    assert log_line.read("nats", f"[77] 2026/11/30 12:00:00.123456 [{mark}] text", None).level == level


def test_a_level_named_in_the_text_is_not_the_lines():
    assert log_line.read("engine", OURS.format("INFO", "an ERROR came back"), None).level == logging.INFO


def test_lines_without_a_level_belong_to_the_one_before():
    before = log_line.read("engine", OURS.format("DEBUG", "a dict:"), None)
    assert log_line.read("engine", "  {1: 2}", before).level == logging.DEBUG


def test_first_words_of_a_process_are_information_and_tracebacks_are_errors():
    before = log_line.read("gateway", "samovar gateway serves on http://127.0.0.1:8080", None)
    assert before.level == logging.INFO
    traceback = log_line.read("engine", "Traceback (most recent call last):", before)
    assert traceback.level == logging.ERROR
    assert log_line.read("engine", "OSError: broken", traceback).level == logging.ERROR


def test_the_known_false_alarm_of_nats_is_none():
    line = log_line.read(
        "nats", "[7] 2026/11/30 12:00:00.1 [WRN] Plaintext passwords detected, use nkeys or bcrypt", None
    )
    assert line.level == logging.INFO
