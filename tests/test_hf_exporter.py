"""effcompile as a backend of transformers.exporters: exported, saved, read back without the model's code of
ours, and hostile files.
"""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_models import captured, ids

import effcompile

pytest.importorskip("transformers.exporters")
from transformers import BertConfig, BertModel, GenerationConfig
from transformers.exporters.auto import AutoHfExporter
from transformers.exporters.base import ExportedModel
from transformers.exporters.configs import DynamoConfig

from effcompile.hf_exporter import EffcompileConfig, EffcompileExporter

ASKED = {"export_format": "effcompile", "backend": "torch-eager"}
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return BertModel(BertConfig(**TINY), add_pooling_layer=False).eval()


@pytest.fixture(scope="module")
def inputs() -> dict[str, Any]:
    given = torch.arange(12).view(2, 6) + 3
    return {"input_ids": given, "attention_mask": torch.ones_like(given), "output_hidden_states": True}


@pytest.fixture(scope="module")
def exported(model: Any, inputs: dict[str, Any]) -> ExportedModel:
    return AutoHfExporter.from_config(ASKED).export(model, inputs, EffcompileConfig.from_dict(ASKED))


def test_an_export_returns_what_the_model_returns(
    exported: ExportedModel, model: Any, inputs: dict[str, Any], tmp_path: Path
) -> None:
    exported.save_pretrained(tmp_path / "twice")
    exported.save_pretrained(tmp_path / "twice")  # over the first one
    other = {**inputs, "input_ids": inputs["input_ids"] + 7}
    with torch.no_grad():
        right = model(**other)
    for each in (exported, ExportedModel.from_pretrained(tmp_path / "twice")):
        # what it was not traced with is dropped, as with the other exporters
        found = each(**other, return_loss=False)
        assert type(found) is type(right) and len(found.hidden_states) == 2
        torch.testing.assert_close(found.last_hidden_state, right.last_hidden_state)
        assert str(each.device) == "cpu" and each.dtype is torch.float32


def test_a_generation_says_what_the_model_says(tmp_path: Path) -> None:
    model = captured("llama", num_hidden_layers=1)[0]
    text = ids(1, 9, seed=1)
    right = model.generate(text, max_new_tokens=8, do_sample=False)
    asked = EffcompileConfig(context=32, prompt=8, new=8, backend="torch-eager", passes=("rows",))
    exported = EffcompileExporter().export_for_generation(model, {"input_ids": text}, asked)
    exported.save_pretrained(tmp_path)
    for each in (exported, ExportedModel.from_pretrained(tmp_path)):
        assert torch.equal(
            each.runners["generation"].program.generate(text, max_new_tokens=8, do_sample=False), right
        )


def test_what_is_not_ours_to_do_is_refused(
    exported: ExportedModel, model: Any, inputs: dict[str, Any]
) -> None:
    with pytest.raises(effcompile.UsageError, match="the plan is for cpu"):
        exported.to("cuda")
    config, exporter = EffcompileConfig(context=8), EffcompileExporter()
    with pytest.raises(effcompile.UsageError, match="plans the cache itself"):
        exporter.export_for_generation(
            model, inputs, config, generation_config=GenerationConfig(cache_implementation="static")
        )
    with pytest.raises(effcompile.UsageError, match="the one component is 'generation'"):
        exporter.export_for_generation(model, inputs, {"decode": config})
    with pytest.raises(effcompile.UsageError, match="config is a DynamoConfig"):
        exporter.export_for_generation(model, inputs, DynamoConfig())
    with pytest.raises(TypeError, match="max_eror"):
        EffcompileConfig.from_dict({"max_eror": 0.1})


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("../plan.json", zipfile.ZIP_STORED, "does not write"),
        ("plan.json", zipfile.ZIP_DEFLATED, "does not write"),
        ("a", 0, "no plan.json"),
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, name: str, how: int, said: str) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.writestr(name, "{}", compress_type=how)
    with pytest.raises(effcompile.FormatError, match=said):
        EffcompileExporter.load_program(tmp_path / "x.zip")
    (tmp_path / "x.zip").write_bytes(b"PK no zip")
    with pytest.raises(effcompile.FormatError, match="Export the model again"):
        EffcompileExporter.load_program(tmp_path / "x.zip")
