"""Who may import whom: read from the sources, so that no import needs to succeed (or torch to be installed).

The rules are those of docs/structure.md. An import inside a function counts like any other; one under `TYPE_CHECKING`
does not run and counts for nothing.
"""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "engine", "kvstore", "cli")

LAYERS = (
    ("kernels",),
    ("services.engine.model", "services.engine.weights"),
    ("services.engine.runner",),
    ("services.engine.core",),
    ("services.engine.server",),
    ("services.engine.__main__",),
)
"""A module imports nothing of a later layer, not even by way of others."""

TORCH_FREE = (
    "services.gateway",
    "services.kvstore",
    "services.cli",
    "services.protocol",
    *(f"services.engine.{name}" for name in ("config", "request", "batch", "mailbox", "scheduler", "core", "server")),
    "services.engine.cache",
)
WITH_TORCH = tuple(f"services.engine.cache.{name}" for name in ("pages", "states", "transfer"))
"""Exceptions to TORCH_FREE."""

Graph = Mapping[str, Set[str]]
"""Module -> the modules that it names in imports."""
Rule = Callable[[Graph], Iterator[str]]
"""Yields a line for each violation."""


def within(module: str, *packages: str) -> bool:
    """Whether `module` is one of the packages or lies in one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def top(module: str) -> str:
    return module.partition(".")[0]


class Imports(ast.NodeVisitor):
    """Collects what a module imports."""

    def __init__(self, ours: Set[str]) -> None:
        self._ours = ours
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                self.visit(other)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            self.found.add("." * node.level + (node.module or ""))
            return
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            self.found.add(submodule if submodule in self._ours else node.module)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) in ("__import__", "import_module", "importlib.import_module"):
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    self.found.add(name)
                case _:
                    self.found.add("(computed)")
        self.generic_visit(node)


def graph_of(sources: Mapping[str, str]) -> Graph:
    found: dict[str, Set[str]] = {}
    for module, source in sources.items():
        imports = Imports(sources.keys())
        imports.visit(ast.parse(source, module))
        found[module] = imports.found
    return found


def sources() -> dict[str, str]:
    """All modules of the product by name."""
    files = [path for folder in ("services", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text("utf-8")
        for path in files
    }


def reach(graph: Graph, start: str) -> dict[str, list[str]]:
    """Everything that importing `start` imports, with the way to it. A package's __init__ runs before its modules."""
    ways: dict[str, list[str]] = {}
    todo = [(start, [start])]
    while todo:
        module, way = todo.pop()
        if module in ways:
            continue
        ways[module] = way
        parent = module.rpartition(".")[0]
        nexts = graph.get(module, frozenset()) | ({parent} if parent in graph else frozenset())
        todo += [(name, [*way, name]) for name in sorted(nexts)]
    return ways


def foreign_services(graph: Graph) -> Iterator[str]:
    """Services share `services.protocol` and the modules right under `services`; cli also reads others' configs."""
    for module, imports in graph.items():
        package = module.split(".")[1] if module.startswith("services.") else ""
        for name in imports:
            service = name.split(".")[1] if name.startswith("services.") else ""
            allowed = service == package or (package == "cli" and name == f"services.{service}.config")
            if service in SERVICES and not allowed:
                yield f"{module} imports {name}"


def protocol_stands_alone(graph: Graph) -> Iterator[str]:
    """The protocol needs msgspec and the standard library, nothing else."""
    for module, imports in graph.items():
        if within(module, "services.protocol"):
            for name in imports:
                standard = top(name) in sys.stdlib_module_names
                if not (standard or top(name) == "msgspec" or within(name, "services.protocol")):
                    yield f"{module} imports {name}"


def kernels_stand_alone(graph: Graph) -> Iterator[str]:
    """Kernels need torch, triton and the standard library; one file uses flash-linear-attention where it is there."""
    for module, imports in graph.items():
        if within(module, "kernels"):
            allowed = {"torch", "triton", "kernels", *(["fla"] if module == "kernels.gated_delta.flash" else [])}
            for name in imports:
                if top(name) not in sys.stdlib_module_names | allowed:
                    yield f"{module} imports {name}"


def torch_where_it_belongs(graph: Graph) -> Iterator[str]:
    """Scheduler, cache bookkeeping and all services but the engine load without torch, also by way of others."""
    shared = [module for module in graph if module.startswith("services.") and module.count(".") == 1]
    for module in graph:
        free = within(module, *TORCH_FREE) or (module in shared and module.split(".")[1] not in SERVICES)
        if free and not within(module, *WITH_TORCH):
            for name, way in reach(graph, module).items():
                if top(name) in ("torch", "triton"):
                    yield " -> ".join(way)


def layers_point_down(graph: Graph) -> Iterator[str]:
    """kernels <- model <- runner <- core <- server <- __main__."""
    for number, layer in enumerate(LAYERS):
        above = [name for higher in LAYERS[number + 1 :] for name in higher]
        for module in graph:
            if within(module, *layer):
                for name, way in reach(graph, module).items():
                    if within(name, *above):
                        yield " -> ".join(way)


def no_transformers(graph: Graph) -> Iterator[str]:
    """Only tests may use it, as an oracle."""
    for module, imports in graph.items():
        for name in imports:
            if top(name) == "transformers":
                yield f"{module} imports {name}"


def plain_imports(graph: Graph) -> Iterator[str]:
    """Absolute and readable, else the rules above see nothing."""
    for module, imports in graph.items():
        for name in imports:
            if name.startswith(".") or name == "(computed)":
                yield f"{module} imports {name}"


RULES = (
    foreign_services,
    protocol_stands_alone,
    kernels_stand_alone,
    torch_where_it_belongs,
    layers_point_down,
    no_transformers,
    plain_imports,
)


def messages(found: Iterable[str]) -> str:
    return "\n".join(found)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(sources())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_holds(graph: Graph, rule: Rule) -> None:
    assert messages(rule(graph)) == ""


def test_the_sources_are_really_read(graph: Graph) -> None:
    assert {"services.settings", "services.protocol.kv", "services.gateway.config", "kernels"} <= graph.keys()
    assert "services.protocol.generate" in graph["services.engine.batch"]
    assert any(top(name) == "torch" for imports in graph.values() for name in imports)


def test_kernels_init_is_empty() -> None:
    """Hugging Face's libraries import whatever package is called `kernels` and look into it."""
    assert (ROOT / "kernels" / "__init__.py").read_bytes() == b""


@pytest.mark.parametrize(
    ("rule", "planted"),
    [
        (foreign_services, {"services.gateway.x": "from services.engine.config import EngineConfig"}),
        (foreign_services, {"services.engine.x": "import services.kvstore.arena"}),
        (foreign_services, {"services.cli.x": "from services.gateway.app import create_app"}),
        (foreign_services, {"services.bus": "def f():\n  from services.gateway import config"}),
        (foreign_services, {"kernels.x": "import services.engine"}),
        (protocol_stands_alone, {"services.protocol.x": "from services.settings import load"}),
        (protocol_stands_alone, {"services.protocol.x": "import nats"}),
        (kernels_stand_alone, {"kernels.op.x": "from services.protocol import kv"}),
        (kernels_stand_alone, {"kernels.op.x": "import numpy as np"}),
        (torch_where_it_belongs, {"services.gateway.x": "import torch"}),
        (torch_where_it_belongs, {"services.telemetry": "from torch import nn"}),
        (torch_where_it_belongs, {"services.engine.scheduler": "try:\n  import torch\nexcept ImportError: pass"}),
        (
            torch_where_it_belongs,
            {
                "services.engine.cache.offload": "from services.engine.cache.transfer import copy",
                "services.engine.cache.transfer": "import torch",
            },
        ),
        (
            torch_where_it_belongs,
            {
                "services.engine.core": "from services.engine.model import config",
                "services.engine.model": "import torch",
            }
            | {"services.engine.model.config": ""},
        ),
        (layers_point_down, {"services.engine.model.x": "from services.engine.runner import ModelRunner"}),
        (
            layers_point_down,
            {"services.engine.core": "from services.engine import server", "services.engine.server": ""},
        ),
        (
            layers_point_down,
            {
                "services.engine.runner": "import services.engine.sampler",
                "services.engine.sampler": "from services.engine.core import Core",
            },
        ),
        (no_transformers, {"services.engine.weights.x": "def f():\n  import transformers.models"}),
        (no_transformers, {"services.engine.weights.x": "importlib.import_module('transformers')"}),
        (plain_imports, {"services.gateway.x": "from . import config"}),
        (plain_imports, {"services.gateway.x": "import_module(name)"}),
    ],
)
def test_each_rule_finds_what_it_forbids(rule: Rule, planted: dict[str, str]) -> None:
    assert messages(rule(graph_of(planted))) != ""


def test_what_is_allowed() -> None:
    fine = graph_of(
        {
            "services.cli.x": "from services.gateway.config import GatewayConfig\nfrom services.engine import config",
            "services.gateway.config": "from services.settings import load\nfrom services.protocol import kv",
            "services.engine.config": "",
            "services.engine.cache.pages": "import torch",
            "services.engine.runner": "import torch, services.engine.model.dense",
            "services.engine.model.dense": "import kernels.attention, torch",
            "services.engine.scheduler": "if TYPE_CHECKING:\n  import torch\nelse:\n  import math",
            "services.protocol.kv": "import msgspec, sys",
        }
    )
    assert messages(problem for rule in RULES for problem in rule(fine)) == ""
