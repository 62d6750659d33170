"""Other engines of decoding, each in a process of its own that answers one call at a time: it times itself.

As a program it is that process (numpy and the engine are all that it imports), told by its arguments which
engine, where it is or how it is set, the model's file or folder, tokens at the most, threads and the size of
the vocabulary. It reads (afresh, count) and so many tokens, and answers its seconds and the logits of the
last one.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

_HERE = Path(__file__).resolve()
#: As llama.h numbers files of one kind of weights.
LLAMA_TYPES = {"q8_0": 7, "q4_0": 2, "q6_K": 18, "q4_K_M": 15}
Evaluate = Callable[[np.ndarray, bool], np.ndarray]


@dataclass(frozen=True)
class Sizes:
    tokens: int
    threads: int
    vocabulary: int


class Peer:
    """An engine at work in its process."""

    def __init__(self, python: str, engine: str, where: str, model: Path, sizes: Sizes) -> None:
        command = [python, str(_HERE), engine, where, str(model), *map(str, astuple(sizes))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(sizes.threads)}
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def evaluate(self, ids: np.ndarray, afresh: bool) -> tuple[float, np.ndarray]:
        """Seconds, and the logits of the last of these tokens."""
        into, out = self._process.stdin, self._process.stdout
        assert into is not None and out is not None
        into.write(struct.pack("<ii", afresh, len(ids)) + ids.astype(np.int32).tobytes())
        into.flush()
        head = out.read(12)
        if len(head) < 12:
            raise SystemExit(f"The peer's process ended: {' '.join(map(str, self._process.args))}")  # type: ignore[arg-type]
        seconds, count = struct.unpack("<di", head)
        return seconds, np.frombuffer(out.read(4 * count), np.float32)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# ------------------------------------------------------------------ llama.cpp


def llama_shim(libraries: Path, headers: list[Path], built: Path) -> Path:
    """The shim, compiled against llama.cpp's headers and linked with the libraries of a folder."""
    found = [next(libraries.glob(f"{name}*so*")).name for name in ("libllama.", "libggml.", "libggml-base.")]
    target = built / "llama_shim.so"
    links = [f"-l:{name}" for name in found]
    source = _HERE.with_name("_llama_shim.cpp")
    flags = ["-O2", "-shared", "-fPIC", f'-DBACKENDS="{libraries}"', *(f"-I{folder}" for folder in headers)]
    flags += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,--allow-shlib-undefined"]
    subprocess.run(["g++", *flags, str(source), "-o", str(target), *links], check=True)
    return target


def quantize(shim: Path, source: Path, target: Path, kind: str) -> None:
    """A GGUF file of another kind of weights, by llama.cpp itself, in a process of its own."""
    code = (
        "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); lib.shim_init(); "
        "sys.exit(lib.shim_quantize(sys.argv[2].encode(), sys.argv[3].encode(), int(sys.argv[4])))"
    )
    given = (str(shim), str(source), str(target), str(LLAMA_TYPES[kind]))
    subprocess.run([sys.executable, "-c", code, *given], check=True)


def _llama(where: str, model: Path, sizes: Sizes) -> Evaluate:
    """`where` is the shim."""
    lib = ctypes.CDLL(where)
    lib.shim_init()
    lib.shim_evaluate.restype = ctypes.POINTER(ctypes.c_float)
    lib.shim_evaluate.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    if said := lib.shim_load(str(model).encode(), sizes.tokens, sizes.threads):
        raise SystemExit(f"llama.cpp cannot load {model}: {said}")

    def evaluate(ids: np.ndarray, afresh: bool) -> np.ndarray:
        given = np.ascontiguousarray(ids, np.int32)
        found = lib.shim_evaluate(given.ctypes.data, len(given), int(afresh))
        return np.ctypeslib.as_array(found, (sizes.vocabulary,))

    return evaluate


# ------------------------------------------------------------------ onnxruntime-genai, OpenVINO


def save_folder(model: Any, folder: Path) -> None:
    """As Hugging Face has it, with a tokenizer of bytes, which their builders want."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    letters = {
        letter: at for at, letter in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    more = {f"<t{at}>": at for at in range(len(letters), model.config.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, **more}, merges=[]))
    marks = {"bos_token": "<eos>", "eos_token": "<eos>", "pad_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder)


_OPENVINO = """
import sys
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
held = OVWeightQuantizationConfig(bits=4, sym=True, group_size=32, ratio=1.0, all_layers=True)
OVModelForCausalLM.from_pretrained(
    sys.argv[1], export=True, compile=False, load_in_8bit=False, quantization_config=held
).save_pretrained(sys.argv[2])
"""


def build_int4(python: str, engine: str, folder: Path, out: Path) -> None:
    """A folder in 4 bits in groups of 32, by the engine's own builder, in the interpreter that has it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if engine == "openvino":
        command = [python, "-c", _OPENVINO, str(folder), str(out)]
    else:
        options = ["int4_block_size=32", "int4_accuracy_level=4"]
        command = [python, "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(out)]
        command += ["-p", "int4", "-e", "cpu", "-c", str(out / "cache"), "--extra_options", *options]
    subprocess.run(command, check=True, env=environment, cwd=folder)


def _genai(where: str, model: Path, sizes: Sizes) -> Evaluate:
    import onnxruntime_genai as og  # type: ignore[import-not-found, unused-ignore]

    config = og.Config(str(model))
    threads = {"session_options": {"intra_op_num_threads": sizes.threads}}
    config.overlay(json.dumps({"model": {"decoder": threads}}))
    held = og.Model(config)
    state = {}

    def evaluate(ids: np.ndarray, afresh: bool) -> np.ndarray:
        if afresh:
            parameters = og.GeneratorParams(held)
            parameters.set_search_options(max_length=sizes.tokens, batch_size=1, do_sample=False)
            state["now"] = og.Generator(held, parameters)
        state["now"].append_tokens(np.array(ids, np.int32)[None])  # a copy, which it may write to
        found: np.ndarray = state["now"].get_logits()[0, -1]
        return found

    return evaluate


def _openvino(where: str, model: Path, sizes: Sizes) -> Evaluate:
    import openvino as ov

    settings = {"INFERENCE_NUM_THREADS": sizes.threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    precision = "bf16" if where == "bf16" else "f32"
    compiled = ov.Core().compile_model(
        model / "openvino_model.xml", "CPU", {**settings, "INFERENCE_PRECISION_HINT": precision}
    )
    request = compiled.create_infer_request()
    names = {name for each in compiled.inputs for name in each.names}
    past = [0]

    def evaluate(ids: np.ndarray, afresh: bool) -> np.ndarray:
        if afresh:
            request.reset_state()
            past[0] = 0
        at = past[0]
        past[0] = at + len(ids)
        given = {
            "input_ids": ids.astype(np.int64)[None],
            "attention_mask": np.ones((1, past[0]), np.int64),
            "beam_idx": np.zeros(1, np.int32),
            "position_ids": np.arange(at, past[0], dtype=np.int64)[None],
        }
        request.infer({name: value for name, value in given.items() if name in names})
        found: np.ndarray = request.get_tensor("logits").data[0, -1]
        return found

    return evaluate


ENGINES = {"llama.cpp": _llama, "genai": _genai, "openvino": _openvino}


def main() -> None:
    engine, where, model, *sizes = sys.argv[1:]
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the engine prints is none of the answers
    evaluate = ENGINES[engine](where, Path(model), Sizes(*map(int, sizes)))
    while head := sys.stdin.buffer.read(8):
        afresh, count = struct.unpack("<ii", head)
        ids = np.frombuffer(sys.stdin.buffer.read(4 * count), np.int32)
        start = time.perf_counter()
        logits = evaluate(ids, bool(afresh))
        seconds = time.perf_counter() - start
        made = np.ascontiguousarray(logits, np.float32).reshape(-1)
        out.write(struct.pack("<di", seconds, len(made)) + made.tobytes())
        out.flush()


if __name__ == "__main__":
    main()
