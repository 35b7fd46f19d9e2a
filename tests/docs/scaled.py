"""Command lines with a hundredth of the steps, and networks of few layers: what takes long on a page takes a moment."""

from collections.abc import Sequence

_SCALE = 100
_FEW = 5
_SMALL = {"--stages": "2", "--micro-batches": "2", "--devices": "4"}
_COUNTS = ("--steps", "--save-every", "--test-every", "--warmup-steps", "--schedule-steps")


def scaled(arguments: Sequence[str]) -> list[str]:
    """The arguments, with every number of steps divided by a hundred, one at least; a few steps stay as they are.

    A training that does not say how many does one. A GPT whose steps have stages has one layer, two stages and two
    micro-batches, on four devices, any other one is searched for eight at most; the simulated network has few blocks,
    on one node.
    """
    if arguments[1:2] == ["gpt"] and {"--stages", "pipeline.json"} & set(arguments) and "--arg" not in arguments:
        pairs = zip(("", *arguments), arguments, strict=False)
        arguments = [*(_SMALL.get(option, argument) for option, argument in pairs), "--arg", "layers=1"]
    if list(arguments[:2]) == ["search", "gpt"]:
        arguments = ["8" if argument in ("32", "64") else argument for argument in arguments]
    if list(arguments[:2]) == ["search", "inception_v3"]:
        arguments = [*("8" if argument == "16" else argument for argument in arguments), "--arg", "blocks=1,1,1"]
    if arguments[:1] == ["train"] and "--steps" not in arguments:
        arguments = [*arguments, "--steps", "1"]
    options = ("", *arguments)
    return [
        _scaled(int(argument)) if option in _COUNTS else argument
        for option, argument in zip(options, arguments, strict=False)
    ]


def _scaled(count: int) -> str:
    return str(count if count <= _FEW else max(1, count // _SCALE))
