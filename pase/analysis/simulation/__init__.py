"""A discrete-event simulator of one training step of a placed plan on a machine."""

from pase.analysis.simulation.collectives import COLLECTIVES, DEFAULT_COLLECTIVES
from pase.analysis.simulation.critical import Activity, PathStep
from pase.analysis.simulation.simulation import Simulation, simulate
from pase.analysis.simulation.trace import TimelineEvent, Track, chrome_trace, timeline
from pase.analysis.simulation.usage import DeviceTime, LevelUse, PhaseTime

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
