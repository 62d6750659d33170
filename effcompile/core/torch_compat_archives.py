"""Whether opening a program of torch.export runs code that its file brings; private APIs.

`torch.export.load` does, in many places: it unpickles tensors, constants and, where they are not plain,
example inputs; evaluates sizes as Python; imports the modules that the structures of arguments name; loads
compiled libraries. And fx writes the names of a graph into the source of its forward. So what a program of
plain tensors needs is allowed, and nothing else.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

_CONFIGS = re.compile(r"data/(weights|constants)/\w+_config\.json")
_INPUTS = re.compile(r"data/sample_inputs/\w+\.pt")
_PROGRAM = re.compile(r"models/\w+\.json")
_PLAIN = re.compile(
    r"data/(weights/weight|constants/tensor)_\d+|extra/[\w.-]+|archive_(format|version)|byteorder|version"
    r"|\.data/[\w.]+"
)
#: What fx writes into source as it is; names of parameters, any keys of a ModuleDict, which it quotes.
_NAME, _OF_MODULE = re.compile(r"[\w.]*"), re.compile(r"[^\"'\\\x00-\x1f]*")
_NAMES = ("name", "as_name", "as_names", "arg", "target", "forward_arg_names", "graph_name")
_OF_MODULES = ("parameter_name", "buffer_name", "tensor_constant_name", "buffer_to_mutate", "fqn")
#: What sizes are computed with: classes of SymPy, and torch's own beside them.
_FUNCTIONS = re.compile(
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Mod|floor|ceiling|Abs|Eq|Equality|Ne|Unequality|Lt|Le"
    "|Gt|Ge|LessThan|StrictLessThan|GreaterThan|StrictGreaterThan|And|Or|Not|Piecewise|ExprCondPair"
    "|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift"
    "|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|TruncToFloat|TruncToInt"
    "|RoundToInt|RoundDecimal|ToFloat|Identity|BitwiseFn_bitwise_and|BitwiseFn_bitwise_or"
)
_WORDS = re.compile(r"[A-Za-z_]\w*|-?[0-9.]+(e[+-]?[0-9]+)?")
_LONGEST = 20_000
_SHAPED = (
    ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp,
    ast.operator, ast.unaryop, ast.Compare, ast.cmpop, ast.Tuple,
)  # fmt: skip


def what_runs_code(path: Path) -> str | None:
    """What in a .pt2 would run code, or reach beyond the file, when it is opened and run, in words; None
    where nothing does.

    Raises:
        ValueError: it is no archive of torch.export.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.namelist()
        reader = torch._C.PyTorchFileReader(str(path))
        names: list[str] = reader.get_all_records()
    except (zipfile.BadZipFile, RuntimeError, OSError, NotImplementedError) as error:
        raise ValueError(str(error).partition("\n")[0]) from error
    root = listed[0].partition("/")[0] if listed else ""
    if sorted(listed) != sorted(f"{root}/{name}" for name in set(names)):
        return "names that stand twice or beside its own folder"
    read = {name: reader.get_record(name) for name in names if not _PLAIN.fullmatch(name)}
    try:
        return next(filter(None, (_in_file(name, content) for name, content in read.items())), None)
    except (
        ValueError,
        AttributeError,
        TypeError,
        KeyError,
        RecursionError,
        SyntaxError,
        MemoryError,
    ) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _in_file(name: str, content: bytes) -> str | None:
    if _CONFIGS.fullmatch(name):
        held = json.loads(content)["config"].values()
        odd = [each for each in held if each.get("use_pickle") or not _plain(name, each["path_name"])]
        return "pickles" if odd else None
    if _INPUTS.fullmatch(name):
        return "pickles" if content and not _loads_plainly(content) else None
    if _PROGRAM.fullmatch(name):
        return next(
            filter(None, (_in_place(key, each) for key, each in _strings("", json.loads(content)))), None
        )
    return (
        "a compiled library" if "aotinductor" in name else "pickles" if name.endswith(".pt") else f"{name!r}"
    )


def _plain(config: str, file: str) -> bool:
    return _PLAIN.fullmatch(f"{config.rpartition('/')[0]}/{file}") is not None


def _loads_plainly(content: bytes) -> bool:
    """Whether torch reads it without unpickling classes, as it tries first."""
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception:
        return False
    return True


def _strings(key: str, value: object) -> Iterator[tuple[str, str]]:
    """(the name it has, text) of each text in a tree of JSON."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _strings(name, each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(key, each)


def _in_place(key: str, text: str) -> str | None:
    if key == "expr_str" and not _is_arithmetic(text):
        return f"a size that is no arithmetic ({text[:60]!r})"
    if key in ("in_spec", "out_spec") and (module := _imported(json.loads(text) if text else None)):
        return f"a structure that imports the module {module!r}"
    if (key in _NAMES and not _NAME.fullmatch(text)) or (
        key in _OF_MODULES and not _OF_MODULE.fullmatch(text)
    ):
        return f"a name that is none ({text[:60]!r})"
    if key == "target" and text.split(".")[2:4] == ["aten", "from_file"]:
        return "an operator that reads other files"
    return None


def _is_arithmetic(text: str) -> bool:
    """Whether SymPy, which evaluates it as Python, finds sums and the like of symbols and numbers."""
    if len(text) > _LONGEST:
        return False
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _SHAPED):
            return False
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or not _FUNCTIONS.fullmatch(node.func.id):
                return False
            texts = [
                a for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, (str, bytes))
            ]
            if texts and node.func.id not in ("Symbol", "Float"):  # others evaluate a text in their turn
                return False
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and not _WORDS.fullmatch(node.value)
        ):
            return False
    return True


def _imported(spec: object) -> str | None:
    """The module that reading the structure of arguments imports; None where it imports none."""
    if isinstance(spec, str):  # the context of a node is JSON in a text
        try:
            spec = json.loads(spec)
        except ValueError:
            return None
        return _imported(spec) if isinstance(spec, (dict, list)) else None
    if isinstance(spec, list):
        return next(filter(None, map(_imported, spec)), None)
    if not isinstance(spec, dict):
        return None
    named = spec.get("default_factory_module")
    if named is not None and named != "builtins":
        return str(named)
    if "__enum__" in spec:
        return str(spec.get("fqn")).partition(":")[0]
    return next(filter(None, map(_imported, spec.values())), None)
