"""Tiny models captured once, and one graph exported once: what is planned differs, the graph does not."""

from collections.abc import Iterator
from dataclasses import replace

import onnx
import onnx_ir as ir
import pytest
import torch
from torch.utils import _pytree as pytree
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from effcompile.backends.onnxruntime import lowering
from effcompile.backends.onnxruntime.export import OnnxExport
from effcompile.capture import capture
from effcompile.ir.program import Program


def _inputs():
    torch.manual_seed(0)
    return {
        "input_ids": torch.randint(0, 100, (2, 16)),
        "attention_mask": torch.ones(2, 16, dtype=torch.long),
    }


@pytest.fixture(scope="session")
def bert():
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=100
    )
    model = BertModel(config).eval()
    return model, capture(model, (), _inputs())


@pytest.fixture(scope="session")
def gpt2():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100)).eval()
    return model, capture(model, (), _inputs())


@pytest.fixture(scope="package")
def exported_once() -> Iterator[None]:
    """Lowering changes what was exported, so each is given one of its own, read from the bytes of
    the first.
    """
    known: dict[object, tuple[OnnxExport, bytes, list[torch.Tensor]]] = {}
    export = lowering.export

    def once(program: Program, *, opset: int) -> OnnxExport:
        tensors = [
            leaf for leaf in pytree.tree_leaves(program.module.state_dict()) if isinstance(leaf, torch.Tensor)
        ]
        shapes = [
            (node.name, node.meta.get("val")) for node in program.graph.nodes if node.op == "placeholder"
        ]
        key = (
            str(program.graph),
            repr(shapes),
            tuple(tensor.data_ptr() for tensor in tensors),
            repr(program.inputs),
            opset,
        )
        if key not in known:
            made = export(program, opset=opset)
            known[key] = made, ir.to_proto(made.model).SerializeToString(), tensors
            return made
        made, written, _ = known[key]
        return replace(made, model=ir.from_proto(onnx.ModelProto.FromString(written)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "export", once)
        yield
