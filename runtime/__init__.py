"""Bundle in, tokens out: engine, scheduler, block pool, backends, sampling."""

from pagelet.runtime.config import EngineConfig
from pagelet.runtime.engine import Engine
from pagelet.runtime.request import Choice, Chunk, ChunkStream, Completion, Request, Timings, Usage
from pagelet.runtime.sampling import SampledToken, SamplerState, SamplingParams
from pagelet.runtime.session import LoadedSession, SessionInfo
from pagelet.runtime.stats import EngineStats

__all__ = [
    "Choice",
    "Chunk",
    "ChunkStream",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "LoadedSession",
    "Request",
    "SampledToken",
    "SamplerState",
    "SamplingParams",
    "SessionInfo",
    "Timings",
    "Usage",
]
