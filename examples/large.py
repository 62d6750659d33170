"""The survey's four questions, one command each, and QLoRA's.

Models without data (the meta device): nothing is allocated.

effcompile plan examples/large.py:llama_7b_lora --mode training --target rtx4090
effcompile plan examples/large.py:llama_7b --mode training --target rtx4090
effcompile plan examples/large.py:llama_13b --mode training --target v100-32gb
effcompile plan examples/large.py:gpt3_175b --mode training --target h100-sxm --devices auto
effcompile plan examples/large.py:llama_33b_lora --mode training --target rtx4090 --max-error 0.15
"""

import peft
import torch
import transformers

optimizer = torch.optim.AdamW


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, 512, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def llama(width: int, inner: int, layers: int, heads: int, dtype: torch.dtype) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM._from_config(config, dtype=dtype).train()


def llama_7b() -> torch.nn.Module:
    """LLaMA-7B (Touvron et al. 2023, table 2), all parameters trained: Stanford's Alpaca."""
    return llama(4096, 11008, 32, 32, torch.bfloat16)


def lora(base: torch.nn.Module) -> torch.nn.Module:
    """A frozen base with LoRA of rank 8 on queries and values."""
    with torch.device("meta"):
        return peft.get_peft_model(
            base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        ).train()


def llama_7b_lora() -> torch.nn.Module:
    """Alpaca-LoRA, hours on one card."""
    return lora(llama_7b())


def llama_33b_lora() -> torch.nn.Module:
    """LLaMA-33B on one card of 24 GB, as QLoRA does (Dettmers et al. 2023): its base in 4 bits."""
    return lora(llama(6656, 17920, 60, 52, torch.bfloat16))


def llama_13b() -> torch.nn.Module:
    """13 billion parameters on one V100, as ZeRO-Offload does (Ren et al. 2021)."""
    return llama(5120, 13824, 40, 40, torch.float16)


def gpt3_175b() -> torch.nn.Module:
    """GPT-3 (Brown et al. 2020, table 2.1)."""
    config = transformers.GPT2Config(n_layer=96, n_head=96, n_embd=12288, n_positions=2048, use_cache=False)
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel._from_config(config, dtype=torch.bfloat16).train()
