"""Operators of the decoder: a torch reference for any device, C++ for the CPU, Triton for GPUs."""

from workers.kernels.batch import StepBatch, build_batch, check_range, fill_ids
from workers.kernels.block_stream import BlockAnswer, BlockStream
from workers.kernels.choose import kernels_for, load_library
from workers.kernels.collective import CollectiveFailed, SharedCollective, memory_bytes
from workers.kernels.compiler import KernelsUnavailable
from workers.kernels.draw import NOT_FINITE, Draw
from workers.kernels.interface import (
    GUESS_BRANCHES,
    Drawn,
    FusedGuesses,
    FusedStep,
    GuessedTokens,
    GuessHead,
    GuessModel,
    GuessTask,
    Kernels,
    LogitsPart,
    PackedLinear,
    PartLinear,
    RankPart,
    StepLayer,
    StepModel,
    Turn,
)
from workers.kernels.library import Library
from workers.kernels.memory import KeptRows
from workers.kernels.order import NodeOrder, SumOrder, balanced, divide, one_leaf
from workers.kernels.paged_cache import CacheForm, LayerCache, PagedCache
from workers.kernels.quantized import QuantizedWeight
from workers.kernels.reference import TorchKernels
from workers.kernels.shared_bytes import shared_bytes
from workers.kernels.step_message import (
    MAX_LOGIT_ROWS,
    Ints,
    StepArrays,
    StepMessage,
    fill_in,
    has_lengths,
    has_placeholders,
    header_of,
    pack_step,
    passes,
    unpack,
)
from workers.kernels.symmetric import PeerMemory, SymmetricCollective
from workers.weight_forms import Quantization

__all__ = [
    "GUESS_BRANCHES",
    "MAX_LOGIT_ROWS",
    "NOT_FINITE",
    "BlockAnswer",
    "BlockStream",
    "CacheForm",
    "CollectiveFailed",
    "Draw",
    "Drawn",
    "FusedGuesses",
    "FusedStep",
    "GuessHead",
    "GuessModel",
    "GuessTask",
    "GuessedTokens",
    "Ints",
    "KeptRows",
    "Kernels",
    "KernelsUnavailable",
    "LayerCache",
    "Library",
    "LogitsPart",
    "NodeOrder",
    "PackedLinear",
    "PagedCache",
    "PartLinear",
    "PeerMemory",
    "Quantization",
    "QuantizedWeight",
    "RankPart",
    "SharedCollective",
    "StepArrays",
    "StepBatch",
    "StepLayer",
    "StepMessage",
    "StepModel",
    "SumOrder",
    "SymmetricCollective",
    "TorchKernels",
    "Turn",
    "balanced",
    "build_batch",
    "check_range",
    "divide",
    "fill_ids",
    "fill_in",
    "has_lengths",
    "has_placeholders",
    "header_of",
    "kernels_for",
    "load_library",
    "memory_bytes",
    "one_leaf",
    "pack_step",
    "passes",
    "shared_bytes",
    "unpack",
]
