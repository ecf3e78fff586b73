"""Each fact stands in one place: a metric, a column, an engine, an option, a recipe field."""

import ast
import dataclasses
import functools
import inspect
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie.commands import arguments, catalog, start_commands
from coterie.core import metrics, tree
from coterie.core.metrics import METRICS
from coterie.core.optim import Recipe
from coterie.core.privacy import Privacy
from coterie.core.ranges import OneOf, fitted, in_words
from coterie.engines import ENGINES
from coterie.runs.config.options import OPTIONS
from coterie.runs.config.schema import Config, EngineTable, RunTable, TrainTable
from coterie.training.guard import Guard
from coterie.views import table, words
from coterie.views.table import TableColumn
from synthetic import comparison_of

SOURCE = Path(coterie.__file__).parent


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def texts(path: Path) -> set[str]:
    """Every string constant of a module but its docstrings."""
    tree = parsed(path)
    said = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if documented(node)}
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)} - said


def documented(node: ast.AST) -> bool:
    return isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)


# ---- metrics ---------------------------------------------------------------------------------


def test_no_module_but_core_metrics_names_a_metric():
    names = METRICS.keys() - {"accuracy"}  # it has tests and summary fields of its own
    for path in SOURCE.rglob("*.py"):
        if path != SOURCE / "core" / "metrics.py":
            assert not texts(path) & names, path


def test_a_row_is_all_that_a_new_metric_needs(monkeypatch):
    def errors(outputs, targets, weights):
        return 100.0 * weights @ (metrics.classes(outputs) != targets) / weights.sum(1)

    row = metrics.Metric(
        "wrong", "error rate", errors, "classes", True, 100.0, higher_is_better=False
    )
    monkeypatch.setitem(METRICS, row.name, row)
    found = metrics.score("wrong", np.array([0, 1, 1, 1]), np.array([0, 1, 0, 0]))
    assert found == 50.0
    assert metrics.metrics_for("classes")[-1] == "wrong"
    assert metrics.gains(np.array([10.0]), np.array([30.0]), "wrong") == [20.0]
    assert words.unit("wrong") == " %"
    assert "error rate" in catalog.listing("metrics")


def test_the_first_metric_of_each_kind_is_the_default():
    assert metrics.metrics_for("classes")[0] == "accuracy"
    assert metrics.metrics_for("numbers")[0] == "rmse"
    assert set(metrics.metrics_for("classes") + metrics.metrics_for("numbers")) == set(METRICS)


def names_of(table: type, field: str) -> tuple[str, ...]:
    (found,) = (m for m in table.model_fields[field].metadata if isinstance(m, OneOf))
    return found.names


def test_a_config_knows_the_metrics_and_engines_that_there_are():
    assert names_of(RunTable, "metric") == ("auto", *METRICS)
    assert names_of(EngineTable, "name") == tuple(ENGINES)
    assert catalog.listing("engines").split()[0] == next(iter(ENGINES))


def test_a_text_out_of_a_list_of_names_is_refused():
    kind = typing.Annotated[str, OneOf(("left", "right"))]
    assert fitted("left", kind) == "left"
    assert in_words(kind) == "'left' or 'right'"
    with pytest.raises(ValueError, match="'left' or 'right'"):
        fitted("up", kind)


# ---- columns ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison():
    return comparison_of(("local", "fedavg"))


def test_a_row_is_all_that_a_new_column_needs(comparison, monkeypatch):
    column = TableColumn(
        "letters {unit}",
        "letters of the name, beside {metric}",
        lambda row, _: "x" * len(row.method),
    )
    monkeypatch.setattr(table, "COLUMNS", (*table.COLUMNS, column))
    shown = table.methods_table(comparison)
    assert shown.columns[-1] == ("letters %", "letters of the name, beside accuracy")
    assert [line.cells[-1] for line in shown.lines] == ["xxxxx", "xxxxxx"]
    assert "letters %" in table.to_text(shown)
    assert "letters of the name, beside accuracy" in table.to_html(shown)


def test_a_column_that_does_not_apply_is_not_shown(comparison):
    hidden = {column.head for column in table.COLUMNS if not column.shown(comparison)}
    asked = {column.head for column in table.COLUMNS if column.name}
    assert hidden - asked == {"serves", "alone", "federated %"}
    assert not hidden & {heading.head for heading in table.methods_table(comparison).columns}


# ---- the recipe and the guard ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"), [(Recipe, "train"), (Guard, "guard"), (Privacy, "privacy")]
)
def test_the_table_has_the_fields_defaults_and_ranges_of_the_dataclass(kind, name):
    made = Config.table(name)
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        of_table = made.model_fields[field.name]
        assert of_table.default == field.default
        assert type(fitted(field.default, hints[field.name])) is type(field.default)
        assert typing.get_type_hints(made, include_extras=True)[field.name] == hints[field.name]


def test_a_config_gives_back_the_recipe_it_was_told():
    recipe = Recipe(optimizer="adam", lr=0.5, steps=3, clip=1.0, dropout=0.25)
    assert TrainTable(**dataclasses.asdict(recipe), precision="tf32").recipe() == recipe
    assert TrainTable().recipe() == Recipe()


# ---- options ---------------------------------------------------------------------------------


def test_every_option_sets_a_field_that_exists():
    for option in OPTIONS.values():
        name, field = option.field.split(".")
        assert field in Config.table(name).model_fields or option.name == "clients"


def test_the_commands_have_the_options_of_python_and_say_what_they_set():
    given = arguments.configured(lambda config, flags: None).__annotations__
    own = inspect.signature(arguments.configured(lambda config, flags: None)).parameters
    assert set(own) - {"config", "set", "code"} == set(OPTIONS)
    for option in OPTIONS.values():
        kind, said = typing.get_args(given[option.name])
        assert kind == option.type | None
        assert f"[{option.field}]" in said.help


def test_help_names_every_kind_that_can_be_listed():
    (said,) = typing.get_args(start_commands.list_names.__annotations__["what"])[1:]
    for kind in catalog.TABLES:
        assert kind in said.help


# ---- trees and files -------------------------------------------------------------------------


class Pair(typing.NamedTuple):
    first: typing.Any
    second: typing.Any


def test_a_tree_is_rebuilt_from_its_leaves():
    made = (Pair(torch.zeros(1), (torch.ones(2), ())), torch.full((3,), 2.0))
    paths, found = zip(*tree.flatten(made), strict=True)
    assert paths == (".0.first", ".0.second.0", ".1")
    again = tree.unflatten(made, [leaf + 1 for leaf in found])
    assert type(again[0]) is Pair
    assert [leaf.tolist() for _, leaf in tree.flatten(again)] == [[1.0], [2.0, 2.0], [3.0] * 3]
    assert list(tree.flatten(torch.ones(1))) == [("", torch.ones(1))]


def test_what_is_asked_for_whole_is_not_taken_apart():
    held = tree.Bank(torch.zeros(2, 3), torch.zeros(1, 2).long(), torch.zeros(1, 2).long())
    (leaf,) = (leaf for _, leaf in tree.flatten((held, ()), (tree.Bank,)))
    assert leaf is held
    assert tree.unflatten((held, ()), ["x"], (tree.Bank,)) == ("x", ())
    assert [path for path, _ in tree.flatten(held)] == [".models", ".slot", ".owner"]


WALKERS = {"core/tree.py"}
# arguments of torch operations: lists and dicts, too
OF_TORCH = {"compiled/trace/modes.py"}


def test_trees_are_walked_in_one_place():
    found = {path for path in modules() if "_fields" in names_in(path)}
    assert found == (WALKERS | OF_TORCH) & set(modules())  # compiled is optional


RENAMERS = {"storage/files.py"}


def test_files_get_their_names_in_one_place():
    """``a.replace(b)`` with one argument is a path's; a text's has two."""
    found = set()
    for path in modules():
        for node in ast.walk(parsed(SOURCE / path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                one = len(node.args) == 1 and not node.keywords
                if node.func.attr in ("replace", "rename", "renames") and one:
                    found.add(path)
    assert found == RENAMERS


def modules() -> list[str]:
    return [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")]


def names_in(path: str) -> set[str]:
    """Attributes that a module reads, also by ``getattr`` and ``hasattr``."""
    found = set()
    for node in ast.walk(parsed(SOURCE / path)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return found
