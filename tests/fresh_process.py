"""Scripts in processes of their own, forked from one that has imported what all of them need, which takes
longer than most of them run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_END = "FRESH PROCESS ENDED "
#: Reads lists of arguments, one a line; of each the script runs in a process of its own, whose end is told.
_SERVER = f"""
import importlib, json, os, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
code = compile(sys.argv[2], "<script>", "exec")
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        sys.argv[1:] = json.loads(line)
        try:
            exec(code, {{"__name__": "__main__"}})
        except BaseException:
            import traceback
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print({_END!r}, flush=True)
"""
#: What capture imports when it is first called, and all models of transformers with it.
CAPTURE = (
    "torch._dynamo.backends.common", "torch._functorch.aot_autograd", "torch._inductor.config",
    "torch._export.non_strict_utils", "torch.fx.experimental.symbolic_shapes", "transformers.generation",
    "transformers.modeling_utils", "transformers.masking_utils", "effcompile.capture",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forks:
    """A script, ready to be run."""

    server: subprocess.Popen[str]

    def answer(self, *arguments: str) -> dict:
        """What the script writes as JSON after the word ANSWER, run with these arguments."""
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(arguments) + "\n")
        self.server.stdin.flush()
        lines = []
        for line in self.server.stdout:
            if line.startswith(_END):
                break
            lines.append(line)
        found = [line for line in lines if line.startswith("ANSWER")]
        assert found, "".join(lines)[-3000:]
        return json.loads(found[0].removeprefix("ANSWER"))


@contextmanager
def forks(
    script: str, imports: Sequence[str] = CAPTURE, folder: Path = Path(__file__).parent
) -> Iterator[Forks]:
    """The script with these modules imported, also from this folder."""
    paths = [str(Path(__file__).parent), str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, json.dumps(imports), script], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    with server:
        yield Forks(server)
        server.kill()
