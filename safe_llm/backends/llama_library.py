"""llama.cpp's C interface, as far as a member needs it: a model, a context, and errors that say what is wrong.

llama.cpp writes its messages to stderr; they are switched off for the whole process, and quoted where loading fails.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from safe_llm.errors import ConfigError, ModelCorruptError, ModelError, UnsupportedModelError

__all__ = ["MAX_BATCH", "CacheType", "LlamaContext", "LlamaModel", "Tokens", "library"]

CacheType = Literal["float32", "float16", "bfloat16"]
MAX_BATCH = 512
"""Tokens that one pass can take."""

_CACHE_TYPES: dict[CacheType, str] = {
    "float32": "GGML_TYPE_F32",
    "float16": "GGML_TYPE_F16",
    "bfloat16": "GGML_TYPE_BF16",
}
_ERROR_LEVEL = 4
_GUESSED_TYPE = 1024  # set in a file type that the file does not state
_NEVER = 2**31 - 1
_DAMAGE = ("corrupted", "incomplete", "magic", "missing tensor", "wrong shape", "wrong number of tensors", "failed to")
_FILLING_IN = ("pre", "suf", "mid", "pad", "rep", "sep")
_messages: deque[str] = deque(maxlen=8)


@functools.cache
def library() -> ModuleType:
    """Load llama.cpp, silence it, and return its functions.

    Raises:
        ConfigError: llama-cpp-python is missing or cannot be loaded.
    """
    hint = 'install it with: pip install "safe-llm-ensemble[llama-cpp]"'
    try:
        functions = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError:
        raise ConfigError("backend 'llama-cpp' needs llama-cpp-python, not installed", hint=hint) from None
    except (OSError, RuntimeError) as error:  # its shared library
        raise ConfigError(f"llama-cpp-python cannot be loaded: {error}", hint="install it again, from source") from None
    functions.llama_log_set(_log_callback(functions), None)
    functions.llama_backend_init()
    return functions


@functools.cache  # kept for as long as the process lives, like the library that calls it
def _log_callback(functions: ModuleType) -> Any:
    def keep_errors(level: int, text: bytes, _: object) -> None:
        if level == _ERROR_LEVEL:
            _messages.append(text.decode("utf-8", errors="replace").strip())

    return functions.llama_log_callback(keep_errors)


class LlamaModel:
    """Weights from a GGUF file.

    Attributes:
        handle: The C pointer.
        width: Columns of its logits.
        architecture: As llama.cpp calls it.
        dtype: How the file's weights are packed, for instance `Q4_K - Medium`.
        is_float32: All weights are float32.
        num_bytes: Of the weights.
        window: Of its sliding layers, 0 if it has none.
        max_context: What it was trained for; 0 if the file does not say.
        short_context: How far it may read with its factors for short texts, or None if it has only one kind.
    """

    def __init__(self, path: Path, *, gpu: int | None = None) -> None:
        """Load the weights.

        Args:
            path: The file.
            gpu: Which GPU gets all layers; None is the CPU.

        Raises:
            ModelCorruptError: The file is damaged.
            UnsupportedModelError: llama.cpp does not know it, or it is no causal decoder that can be rolled back.
        """
        lib = library()
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0 if gpu is None else -1
        if gpu is not None:
            options.split_mode, options.main_gpu = lib.LLAMA_SPLIT_MODE_NONE, gpu
        _messages.clear()
        self.handle = lib.llama_model_load_from_file(str(path).encode(), options)
        if not self.handle:
            raise _load_error(path)
        weakref.finalize(self, lib.llama_model_free, self.handle)
        self.vocabulary = lib.llama_model_get_vocab(self.handle)
        self.width = int(lib.llama_vocab_n_tokens(self.vocabulary))
        self.architecture = self._metadata("general.architecture")
        file_type = int(lib.llama_model_ftype(self.handle))
        self.dtype = (lib.llama_ftype_name(file_type) or b"unknown").decode()
        self.is_float32 = file_type & ~_GUESSED_TYPE == 0
        self.num_bytes = int(lib.llama_model_size(self.handle))
        self.window = int(lib.llama_model_n_swa(self.handle))
        self.max_context = int(lib.llama_model_n_ctx_train(self.handle))
        stated = self._metadata(f"{self.architecture}.rope.scaling.original_context_length")
        is_static = self._metadata(f"{self.architecture}.rope.scaling.type") in ("yarn", "linear")
        self.short_context = int(stated) if stated and not is_static else None

    def end_ids(self) -> list[int]:
        """Return the ids that end an answer, the file's own first.

        llama.cpp also counts words that merely look like an end (`</s>` in Qwen's vocabulary), and those for filling in
        the middle; they are none.
        """
        lib, vocabulary = library(), self.vocabulary
        others = {getattr(lib, f"llama_vocab_fim_{part}")(vocabulary) for part in _FILLING_IN}
        named = [lib.llama_vocab_eos(vocabulary), lib.llama_vocab_eot(vocabulary)]
        known = [token for token in range(self.width) if lib.llama_vocab_is_eog(vocabulary, token)]
        control = [token for token in known if lib.llama_vocab_get_text(vocabulary, token).startswith(b"<|")]
        return list(dict.fromkeys([*(t for t in named if t >= 0), *(t for t in control if t not in others)]))

    def refuse_unsupported(self, name: str) -> None:
        """Raise UnsupportedModelError unless it is a causal decoder whose state can be rolled back."""
        lib = library()
        wrong = {
            "an encoder": lib.llama_model_has_encoder(self.handle),
            "a diffusion model": lib.llama_model_is_diffusion(self.handle),
            "recurrent, whose state cannot be rolled back": lib.llama_model_is_recurrent(self.handle),
            "partly recurrent, whose state cannot be rolled back": lib.llama_model_is_hybrid(self.handle),
            "without a vocabulary": self.width == 0,
        }
        for what, is_so in wrong.items():
            if is_so:
                raise UnsupportedModelError(
                    f"model {name!r} (type {self.architecture!r}) is {what}",
                    hint="only models with full or sliding-window attention in every layer can be members",
                )

    def _metadata(self, key: str) -> str:
        text = ctypes.create_string_buffer(256)
        library().llama_model_meta_val_str(self.handle, key.encode(), text, len(text))
        return text.value.decode("utf-8", errors="replace")


def _load_error(path: Path) -> ModelError:
    # the first message is the cause, those after it say which functions gave up
    reason = _messages[0].split(": ", 1)[-1].removeprefix("error loading model: ") if _messages else "no reason given"
    if any(sign in reason for sign in _DAMAGE):
        return ModelCorruptError(f"llama.cpp cannot load {path.name!r}: {reason}", hint="download or convert it again")
    return UnsupportedModelError(
        f"llama.cpp cannot load {path.name!r}: {reason}",
        hint="a newer llama-cpp-python may know it; else use the model's safetensors version",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What one or more passes append.

    Attributes:
        ids: Token ids, int32 [T].
        positions: Where they stand in their rows, int32 [T].
        sequences: The sequences that they belong to, int32 [T, S].
        is_kept: 1 where logits are wanted, int8 [T].
    """

    ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    sequences: npt.NDArray[np.int32]
    is_kept: npt.NDArray[np.int8]

    def __len__(self) -> int:
        """Return T."""
        return len(self.ids)

    def piece(self, begin: int, stop: int) -> Tokens:
        """Return some neighbouring tokens."""
        part = slice(begin, stop)
        return Tokens(
            ids=self.ids[part],
            positions=self.positions[part],
            sequences=self.sequences[part],
            is_kept=self.is_kept[part],
        )


class LlamaContext:
    """Keys and values of a model's sequences, in one pool of cells that all of them share.

    Attributes:
        num_cells: Tokens that all sequences together can hold.
        num_sequences: Sequences are numbered 0 to `num_sequences` - 1.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        num_cells: int,
        num_sequences: int,
        num_threads: int,
        cache_type: CacheType,
        on_gpu: bool,
    ) -> None:
        """Allocate it.

        Raises:
            MemoryError: llama.cpp could not.
        """
        lib = library()
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_seq_max = num_cells, num_sequences
        options.n_batch = options.n_ubatch = MAX_BATCH
        options.n_threads = options.n_threads_batch = num_threads
        options.type_k = options.type_v = getattr(lib, _CACHE_TYPES[cache_type])
        if cache_type == "float32":
            options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it would round keys and values to float16
        options.offload_kqv = options.op_offload = on_gpu
        # one pool, so that a row needs no memory for what it might become, and a beginning is shared without a copy
        options.kv_unified = options.swa_full = True
        if model.short_context is not None:
            options.yarn_orig_ctx = _NEVER  # else the size of the pool would choose the factors
        self.handle = lib.llama_init_from_model(model.handle, options)
        if not self.handle:
            raise MemoryError
        self.num_cells, self.num_sequences = num_cells, num_sequences
        self._model = model  # must outlive the context
        self._free = weakref.finalize(self, lib.llama_free, self.handle)
        self._memory = lib.llama_get_memory(self.handle)

    def free(self) -> None:
        """Give its memory back; it cannot be used any more."""
        self._free()

    def decode(self, tokens: Tokens) -> int:
        """Append at most `MAX_BATCH` tokens and return llama.cpp's status, 0 where all is well."""
        lib, ints = library(), ctypes.POINTER(ctypes.c_int32)
        num_tokens, per_token = tokens.sequences.shape
        counts = np.full(num_tokens, per_token, dtype=np.int32)
        pointers = tokens.sequences.ctypes.data + np.arange(num_tokens, dtype=np.uintp) * tokens.sequences.strides[0]
        batch = lib.llama_batch(
            n_tokens=num_tokens,
            token=tokens.ids.ctypes.data_as(ints),
            pos=tokens.positions.ctypes.data_as(ints),
            n_seq_id=counts.ctypes.data_as(ints),
            seq_id=pointers.ctypes.data_as(ctypes.POINTER(ints)),
            logits=tokens.is_kept.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        return int(lib.llama_decode(self.handle, batch))

    def logits(self, num_kept: int) -> npt.NDArray[np.float32]:
        """Return the last pass's logits [num_kept, W]; they die with the next one."""
        table = library().llama_get_logits(self.handle)
        return np.ctypeslib.as_array(table, shape=(num_kept, self._model.width))

    def remove(self, sequences: Sequence[int], start: int) -> bool:
        """Forget what these sequences hold from position `start` on; say whether that was possible."""
        return all(library().llama_memory_seq_rm(self._memory, sequence, start, -1) for sequence in sequences)

    def copy(self, source: int, target: int, length: int) -> None:
        """Let a sequence hold the first `length` tokens of another one too. Costs no memory."""
        library().llama_memory_seq_cp(self._memory, source, target, 0, length)

    def copy_to(self, other: Self) -> bool:
        """Fill an empty context with all that this one holds; say whether that was possible."""
        lib = library()
        size = int(lib.llama_state_get_size(self.handle))
        state = (ctypes.c_uint8 * size)()
        return bool(
            lib.llama_state_get_data(self.handle, state, size) == size
            and lib.llama_state_set_data(other.handle, state, size)
        )
