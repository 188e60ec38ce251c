"""The engine's records, under the name that this package's modules use."""

from safe_llm.record import PHASES, SCHEMA_VERSION, phase_seconds, point_record, safe_record

__all__ = ["PHASES", "SCHEMA_VERSION", "phase_seconds", "point_record", "safe_record"]
