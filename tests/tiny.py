"""A tiny random model in a Hugging Face folder, for tests that need all of a model but its sense."""
import json
from pathlib import Path

import torch

import checkpoint
from model import Config, Llama

TINY = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 270, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 258}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>"]  # ids 256 to 259
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def byte_alphabet() -> dict[int, str]:
    """GPT-2's letters for bytes, by its rule: printable ones stand for themselves, the rest follow from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def tiny_folder(path: Path, generation: dict | None = None, scale: float = 1.0, **changes) -> str:
    """A Hugging Face folder: two random layers and a tokenizer of single bytes."""
    config = {**TINY, **changes}
    torch.manual_seed(1)
    model = Llama(Config.from_dict(config)).double()
    weights = {name: scale * p.detach() for name, p in model.state_dict().items()}
    checkpoint.save(str(path), config, weights, generation)
    vocab = {letter: byte for byte, letter in byte_alphabet().items()}
    added = [{"id": 256 + i, "content": s, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for i, s in enumerate(SPECIAL)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (path / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
                  "merges": []}}))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    return str(path)
