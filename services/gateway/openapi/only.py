"""Fields that are understood in a few values only: the parser refuses others by their field's name, and the OpenAPI
document says so."""

from msgspec import Meta

EMPTY = Meta(extra_json_schema={"maxItems": 0})
"""For a list that must have no items."""


def only(*values: str | int | bool | None) -> Meta:
    """For an annotation. It checks nothing itself: a parser's own words say more than `invalid enum value`."""
    return Meta(extra_json_schema={"enum": list(values)})
