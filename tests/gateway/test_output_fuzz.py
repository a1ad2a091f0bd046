"""A bounded run of `fuzz_output`, always with the same seeds."""

from tests.gateway.fuzz_output import check_document, check_mutated


def test_random_documents_are_parsed_alike_at_every_cut() -> None:
    for seed in range(300):
        check_document(seed)


def test_mutated_documents_raise_nothing() -> None:
    for seed in range(300):
        check_mutated(seed)
