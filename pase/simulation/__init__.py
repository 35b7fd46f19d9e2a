"""A discrete-event simulator of one training step of a placed plan on a machine."""

from pase.simulation.collectives import COLLECTIVES, DEFAULT_COLLECTIVES
from pase.simulation.critical import Activity, PathStep
from pase.simulation.simulation import Simulation, simulate
from pase.simulation.trace import TimelineEvent, Track, chrome_trace, timeline
from pase.simulation.usage import DeviceTime, LevelUse, PhaseTime

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
