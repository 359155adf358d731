"""The engines that bench.py compares, behind one small interface: a batch of equal prompts, then a token for each.

    engine.prefill(prompts) -> tokens      forget everything, compute B prompts, the likeliest next token of each
    engine.decode(tokens) -> tokens        compute one more token of each

All of them take the same ids, run the same weights and choose greedily; a test holds that they say the same tokens.
"""
from __future__ import annotations

import ctypes
import os
import tempfile
import warnings
from collections.abc import Sequence

import torch

import checkpoint
import generate
import packed


class Ours:
    def __init__(self, llm: generate.LLM):
        self.llm, self.cache = llm, llm.cache
        self.name = f"nanoinfer {llm.weights}{' compiled' if llm.compiled else ''}"
        tied = [llm.model.model["embed_tokens"]] if llm.model.lm_head is None else []
        self.matrices = [m for m in llm.model.modules() if isinstance(m, (torch.nn.Linear, packed.QuantLinear))] + tied
        self.weight_bytes = sum(t.nbytes for m in self.matrices for t in (*m.parameters(), *m.buffers()))
        slots = (self.cache.n_blocks + 1) * self.cache.block_size
        self.kv_bytes = sum(x.nbytes for x in self.cache._pools()) // slots  # of one token
        self.batch = 0

    @torch.inference_mode()
    def _extend(self, pieces: Sequence[Sequence[int]]) -> list[int]:
        step = self.cache.extend({("bench", b): ids for b, ids in enumerate(pieces)})
        logits = self.llm.batcher.forward(step)  # the model, or what stands for it: compiled, replayed
        self.cache.commit(step)
        return logits.float().argmax(-1).tolist()  # in bfloat16 argmax takes five times as long

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        for b in range(self.batch):
            self.cache.free(("bench", b))
        self.batch = len(prompts)
        for b in range(self.batch):
            self.cache.add(("bench", b), shared=0)  # as new: no block of an earlier round stands in for one of this
        chunk = max(1, generate.CHUNK // self.batch)
        for i in range(0, len(prompts[0]), chunk):
            tokens = self._extend([ids[i: i + chunk] for ids in prompts])
        return tokens

    def decode(self, tokens: Sequence[int]) -> list[int]:
        return self._extend([[t] for t in tokens])

    @torch.inference_mode()
    def matmuls(self, batch: int = 1) -> None:
        """Only the products of a decode step, each matrix once: what is left if all else were free."""
        for m in self.matrices:
            tied = isinstance(m, torch.nn.Embedding)
            width = m.embedding_dim if tied else m.in_features
            x = torch.ones(batch, width, dtype=self.llm.dtype, device=self.llm.device)
            torch.nn.functional.linear(x, m.weight) if tied else m(x)
        if self.llm.device.type == "cuda":
            torch.cuda.synchronize()


class Transformers:
    """transformers on the same weights, in the given dtype, with its own default attention."""

    def __init__(self, model_path: str, dtype: torch.dtype):
        import transformers

        warnings.filterwarnings("ignore", category=FutureWarning)  # an argument's name is about to change
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.name = f"transformers {transformers.__version__} {str(dtype).removeprefix('torch.')}"
        with tempfile.TemporaryDirectory() as folder:
            if os.path.isfile(model_path):
                import gguf

                with gguf.GGUF(model_path) as file:
                    weights = {name: file.tensor(name, dtype) for name in file}
                    checkpoint.save(os.path.join(folder, "m"), file.config, weights)
                model_path = os.path.join(folder, "m")
            self.model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).eval()

    @torch.inference_mode()
    def _extend(self, ids: torch.Tensor) -> list[int]:
        out = self.model(ids, past_key_values=self.past, use_cache=True, logits_to_keep=1)  # type: ignore[has-type]
        self.past = out.past_key_values
        return out.logits[:, -1].argmax(-1).tolist()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self.past = None
        return self._extend(torch.tensor(prompts))

    def decode(self, tokens: Sequence[int]) -> list[int]:
        return self._extend(torch.tensor(tokens)[:, None])


class LlamaCpp:
    """llama.cpp through llama-cpp-python on the same GGUF file, by its own calls for batches of several sequences.

    requantize: round the file once more to this type first ("Q4_0", the fastest), into a temporary file.
    """

    def __init__(self, model_path: str, flash: bool, context: int, batch: int = 1, requantize: str | None = None):
        import llama_cpp
        import numpy

        self.lib, self.numpy = llama_cpp, numpy
        threads = torch.get_num_threads()
        kind = f"{requantize} " if requantize else ""
        self.name = f"llama.cpp ({llama_cpp.__version__}) {kind}flash {'on' if flash else 'off'}"
        silent = llama_cpp.llama_log_callback(lambda *_: None)
        LlamaCpp._silent = silent  # type: ignore[attr-defined]  # kept alive: the library holds the pointer
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            path = model_path
            if requantize:
                path = os.path.join(folder, "m.gguf")
                how = llama_cpp.llama_model_quantize_default_params()
                how.ftype, how.allow_requantize = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{requantize}"), True
                if llama_cpp.llama_model_quantize(model_path.encode(), path.encode(), ctypes.byref(how)):
                    raise ValueError(f"llama.cpp could not requantize {model_path} to {requantize}")
            self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = context * batch, 512, 512, batch
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True  # one buffer of cells for all sequences: the faster form for a few of them
        params.flash_attn_type = 1 if flash else 0
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.model or not self.context:
            raise ValueError(f"llama.cpp could not load {model_path} with a context of {context * batch}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.tokens = llama_cpp.llama_batch_init(512, 0, 1)

    def _run(self, items: Sequence[tuple[int, int, int, bool]]) -> None:
        """Compute (token, position, sequence, wants logits) items in one call."""
        b = self.tokens
        b.n_tokens = len(items)
        for i, (token, position, seq, wanted) in enumerate(items):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = token, position, 1, seq, wanted
        code = self.lib.llama_decode(self.context, b)
        assert code == 0, f"llama_decode failed with {code}"

    def _likeliest(self, i: int) -> int:
        logits = self.lib.llama_get_logits_ith(self.context, i)
        return int(self.numpy.ctypeslib.as_array(logits, (self.vocab,)).argmax())

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self.length, tokens = len(prompts[0]), []
        for seq, ids in enumerate(prompts):
            for i in range(0, len(ids), 512):
                piece = ids[i: i + 512]
                self._run([(t, i + j, seq, i + j == len(ids) - 1) for j, t in enumerate(piece)])
            tokens.append(self._likeliest(len(piece) - 1))
        return tokens

    def decode(self, tokens: Sequence[int]) -> list[int]:
        self._run([(t, self.length, seq, True) for seq, t in enumerate(tokens)])
        self.length += 1
        return [self._likeliest(i) for i in range(len(tokens))]
