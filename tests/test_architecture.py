"""The house: which room may import which, and what every file keeps to.

Imports are read from the syntax trees, so that lazy ones and those for types alone count as well.
What is longer than allowed and known is listed in LARGE, which must be exactly what is so now.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import coterie

SOURCE = Path(coterie.__file__).parent

# A room may import from itself and from the layers before its own.
LAYERS = (
    {"errors"},
    {"core"},
    {"storage"},
    {"algorithms", "adapt", "networks", "data"},
    {"compiled"},
    {"engines"},
    {"training"},
    {"runs"},
    {"views"},
    {"exporting"},
    {"deploy"},
    {"api", "testing"},
    {"commands"},
    {"studies", "advising", "attacking", "onboarding", "diagnosis", "estimator"},
    {"cli"},
    {"__init__", "__main__"},  # the public names, imported when they are first used
)
# Within a layer: functions of an adaptation that a method's paper uses during training.
BESIDE = {("algorithms", "adapt"), ("exporting", "commands")}
# A run shows itself: its text and its page are made by views, imported when they are asked for.
LATE = {("runs", "views")}
FLAT = 4  # modules beside the rooms, at most
STEMS = {"__init__", "base"}  # may occur in every room
LINES = 500  # of a file: as long as one idea needs
BODY = 40  # lines of a function's body without its docstring

# Files of more than LINES lines and functions of more than BODY lines: none may grow.
LARGE: dict[str, int] = {
    "compiled/kernels/triton_kernels:_convolve": 42,  # one GPU program
    "runs/summary:summarise": 48,
}


class Import(NamedTuple):
    """One imported module."""

    by: str  # path without its ending, as in core/tree
    room: str  # whose module it is
    name: str  # what is imported from it


def path_of(file: Path) -> str:
    return file.relative_to(SOURCE).with_suffix("").as_posix()


MODULES = {path_of(file): ast.parse(file.read_text()) for file in sorted(SOURCE.rglob("*.py"))}


def room(path: str) -> str:
    return path.partition("/")[0]


def imports() -> list[Import]:
    """Everything that a module of the package imports from the package."""
    found = []
    for path, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                home = home_of(path, node)
                names = [alias.name for alias in node.names]
                if home is not None:
                    found += [Import(path, room_of(home, name), name) for name in names]
            elif isinstance(node, ast.Import):
                parts = [alias.name.split(".") for alias in node.names]
                found += [Import(path, p[1], p[-1]) for p in parts if p[0] == "coterie" and p[1:]]
    return found


def home_of(path: str, node: ast.ImportFrom) -> list[str] | None:
    """The package path that names are imported from; None for other packages."""
    parts = (node.module or "").split(".") if node.module else []
    if not node.level:
        return parts[1:] if parts and parts[0] == "coterie" else None
    return [*path.split("/")[: -node.level], *parts]


def room_of(home: list[str], name: str) -> str:
    """The room of what is imported: its first folder, or the module itself where it is flat."""
    if home:
        return home[0]
    return name if name in {room(path) for path in MODULES} else "__init__"


def layer(name: str) -> int:
    (found,) = (i for i, rooms in enumerate(LAYERS) if name in rooms)
    return found


# ---- what is violated --------------------------------------------------------------------------


def against_the_layers() -> set[str]:
    found = set()
    for by, to, name in imports():
        own = room(by)
        if own == to or (own, to) in BESIDE or (to, name) == ("__init__", "__version__"):
            continue
        if (own, to) in LATE and not at_once(by, to):
            continue
        if layer(to) >= layer(own):
            found.add(f"{by} imports {to}")
    return found


def at_once(path: str, to: str) -> bool:
    """Whether a module imports a room when it is imported itself."""
    nodes = (node for node in MODULES[path].body if isinstance(node, ast.ImportFrom))
    return any(to in (home_of(path, node) or []) for node in nodes)


def who_imports_compiled() -> set[str]:
    """The compiler hangs by one thread: ``engines/vmap`` imports it inside of functions."""
    found = {
        f"compiled is imported by {by}"
        for by, to, _ in imports()
        if to == "compiled" and layer(room(by)) > layer("compiled") and by != "engines/vmap"
    }
    if at_once("engines/vmap", "compiled"):
        found.add("engines/vmap loads compiled when it is imported")
    return found


def equal_names() -> set[str]:
    stems, classes = defaultdict(set), defaultdict(set)
    for path, tree in MODULES.items():
        stem = path.rpartition("/")[2]
        if stem not in STEMS:
            stems[stem].add(path)
        for folder in path.split("/")[:-1]:
            stems[folder].add(path.partition(f"{folder}/")[0] + folder)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not is_message(path, node):
                classes[node.name].add(path)
    found = {f"two modules are called {s}: {listed(p)}" for s, p in stems.items() if len(p) > 1}
    return found | {
        f"two classes are called {c}: {listed(p)}" for c, p in classes.items() if len(p) > 1
    }


def is_message(path: str, node: ast.ClassDef) -> bool:
    """Whether it is a NamedTuple of a method: its messages and states have plain names."""
    return room(path) == "algorithms" and "NamedTuple" in map(ast.unparse, node.bases)


def listed(paths: set[str]) -> str:
    return ", ".join(sorted(paths))


def private_torch() -> set[str]:
    """Names of torch that begin with an underscore, outside of ``compiled``."""
    found = set()
    for path, tree in MODULES.items():
        if room(path) == "compiled":
            continue
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                first, *parts = name.split(".")
                if first == "torch" and any(p[:1] == "_" and p[:2] != "__" for p in parts):
                    found.add(f"{path} uses {name}")
    return found


def judging_by_method() -> set[str]:
    """``isinstance`` on a concrete method outside of ``algorithms``, also by a tuple of them."""
    methods = {
        node.name
        for path, tree in MODULES.items()
        for node in ast.walk(tree)
        if room(path) == "algorithms" and isinstance(node, ast.ClassDef) and is_dataclass(node)
    }
    found = set()
    for path, tree in MODULES.items():
        if room(path) == "algorithms":
            continue
        tuples = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "isinstance",
                "issubclass",
            ):
                kinds = [n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)]
                held = [tuples[kind] for kind in kinds if kind in tuples]
                kinds += [n.id for h in held for n in ast.walk(h) if isinstance(n, ast.Name)]
                found |= {f"{path} judges by {kind}" for kind in kinds if kind in methods}
    return found


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def sizes() -> dict[str, int]:
    """Files and functions over their limit, and how long they are."""
    found = {}
    for path, tree in MODULES.items():
        lines = len((SOURCE / f"{path}.py").read_text().splitlines())
        if lines > LINES:
            found[path] = lines
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and length(node) > BODY:
                found[f"{path}:{node.name}"] = length(node)
    return found


def length(node: ast.FunctionDef) -> int:
    """Lines of a function's body, its docstring left out."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return node.end_lineno - body[0].lineno + 1 if body else 0


# ---- the laws ----------------------------------------------------------------------------------


def test_every_room_has_a_layer():
    assert {room(path) for path in MODULES} <= set().union(*LAYERS)


def test_rooms_keep_to_their_layers_and_names():
    found = (
        against_the_layers()
        | who_imports_compiled()
        | equal_names()
        | private_torch()
        | judging_by_method()
    )
    assert not found


def test_few_modules_lie_beside_the_rooms():
    flat = {path for path in MODULES if "/" not in path} - {"__init__", "__main__"}
    assert len(flat) <= FLAT


def test_files_and_functions_stay_small():
    found = sizes()
    grown = {name: n for name, n in found.items() if n > LARGE.get(name, 0)}
    assert not grown, "longer than allowed: split it; what is listed in LARGE may only shrink"
    here = {room(path) for path in MODULES}  # compiled is optional: test_optional.py deletes it
    listed = {name for name in LARGE if room(name.partition(":")[0]) in here}
    assert not listed - found.keys(), "small enough now: take it out of LARGE"


def test_the_core_loads_no_readers_and_no_compiler():
    code = """
import importlib, pkgutil, sys
import coterie.core
for module in pkgutil.iter_modules(coterie.core.__path__):
    importlib.import_module(f"coterie.core.{module.name}")
rooms = {".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("coterie.")}
print(*rooms, *({"pyarrow", "sklearn", "triton"} & sys.modules.keys()))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = {f"coterie.{name}" for name in ("core", "errors")}
    # storage is above the core: it is loaded by what is still loaded of data
    assert set(told.stdout.split()) - allowed <= {"coterie.storage"}
