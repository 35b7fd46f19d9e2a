"""A discrete-event simulator of one training step of a placed plan on a machine."""

from pase.analysis.simulation.simulation import (
    Activity,
    DeviceTime,
    LevelUse,
    PathStep,
    PhaseTime,
    Simulation,
    TimelineEvent,
    Track,
    chrome_trace,
    simulate,
    timeline,
)
from pase.analysis.simulation.step import COLLECTIVES, DEFAULT_COLLECTIVES

__all__ = [
    "COLLECTIVES",
    "DEFAULT_COLLECTIVES",
    "Activity",
    "DeviceTime",
    "LevelUse",
    "PathStep",
    "PhaseTime",
    "Simulation",
    "TimelineEvent",
    "Track",
    "chrome_trace",
    "simulate",
    "timeline",
]
