"""Recipes: our own, and what a user's may say."""

from pathlib import Path

import pytest

from services.engine.model.config import ModelError
from services.engine.weights import recipes


def formats(recipe: str, *names: str, layers: int = 64) -> list[str]:
    return [recipes.load(recipe).rule(name, layers).format for name in names]


def mlp(layer: int) -> str:
    return f"model.layers.{layer}.mlp.down_proj.weight"


def test_our_own() -> None:
    assert recipes.names() == ["bf16", "fp8", "gsq3", "int4", "keep", "nvfp4-mixed"]
    assert all(recipes.load(name).description for name in recipes.names())
    assert len({recipes.load(name).digest() for name in recipes.names()}) == 6


def test_nvfp4_mixed() -> None:
    assert formats("nvfp4-mixed", mlp(0), mlp(55), mlp(56), mlp(63)) == ["nvfp4", "nvfp4", "fp8", "fp8"]
    # An eighth of other depths, rounded up.
    assert formats("nvfp4-mixed", mlp(6), mlp(7), layers=8) == ["nvfp4", "fp8"]
    assert formats("nvfp4-mixed", mlp(25), mlp(26), layers=30) == ["nvfp4", "fp8"]
    others = ("model.layers.3.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight")
    assert set(formats("nvfp4-mixed", *others, "mtp.layers.0.mlp.up_proj.weight")) == {"fp8"}
    assert formats("nvfp4-mixed", "model.layers.2.mlp.experts.gate_up_proj") == ["nvfp4"]


def test_gsq3() -> None:
    names = (mlp(0), "model.layers.0.linear_attn.out_proj.weight", "model.embed_tokens.weight", "lm_head.weight")
    assert formats("gsq3", *names) == ["int3-g128", "int3-g128", "int4-g64", "int4-g64"]


def test_keep_and_what_no_rule_names() -> None:
    assert formats("keep", mlp(0)) == ["keep"]
    only = recipes.parse('description = ""\nrules = [{tensors = ["lm_head.*"], format = "fp8"}]', "x")
    assert [only.rule(name, 4).format for name in ("lm_head.weight", mlp(0))] == ["fp8", "keep"]


def test_a_file_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        description = "The first rule that fits decides"
        [[rules]]
        tensors = ["*.mlp.down_proj.weight", "lm_head.weight"]
        format = "int6-g64"
        scales = "float16"
        [[rules]]
        tensors = ["*.mlp.*"]
        format = "int5-g64"
        """
    )
    recipe = recipes.load(str(path))
    assert (recipe.rule(mlp(1), 4).format, recipe.rule(mlp(1), 4).scales) == ("int6-g64", "float16")
    assert recipe.rule("model.layers.1.mlp.up_proj.weight", 4).format == "int5-g64"
    # What does the same has the same digest, whatever it says of itself.
    assert recipes.parse(path.read_text().replace("first", "1st"), "x").digest() == recipe.digest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("description = ''", "missing required field `rules`"),
        ("description = ''\nrules = []\nname = 1", "unknown field `name`"),
        ("description = ''\nrules = [{tensors = ['*'], format = 'fp8', layers = 3}]", "unknown field `layers`"),
        ("description = ''\nrules = [{tensors = '*', format = 'fp8'}]", r"Expected `array`, got `str` - at `\$\.rules"),
        (
            "description = ''\nrules = [{tensors = ['*'], format = 'int4'}]",
            "rule 1: format 'int4' is unknown; known: fp8",
        ),
        ("description = ''\nrules = [{tensors = [], format = 'fp8'}]", "rule 1: tensors is empty"),
        ("description = ''\nrules = [{tensors = ['*'], format = 'fp8', last = 8.0}]", r"rule 1: last is 8\.0"),
        (
            "description = ''\nrules = [{tensors = ['*'], format = 'nvfp4', scales = 'float16'}]",
            "rule 1: format nvfp4 has no scales in float16",
        ),
        ("description", "Expected '='"),
    ],
)
def test_what_cannot_be_used(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=rf"recipe mine: .*{message}"):
        recipes.parse(text, "mine")


def test_no_such_recipe() -> None:
    with pytest.raises(ModelError, match="recipe 'int9' is neither a TOML file nor one of bf16, fp8, gsq3"):
        recipes.load("int9")
