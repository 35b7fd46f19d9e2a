"""First values of parameters: cut from tensors and files, and random ones, against the whole of them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pase.errors import ProgramError
from pase.targets.torch.placements import Held
from pase.targets.torch.values import from_file, from_tensors, random_values

SHAPE = (6, 8)
HELD: Held = (((0, 2), (3, 5)), ((4, 8),))
INDEX = torch.tensor([0, 1, 3, 4])


def part(whole: torch.Tensor) -> torch.Tensor:
    return whole[INDEX][:, 4:8]


def test_parts_of_files(tmp_path: Path) -> None:
    tensors = {"a.w": torch.randn(SHAPE), "b": torch.randn(8).bfloat16(), "s": torch.tensor(3.0)}
    torch.save({"state_dict": tensors}, tmp_path / "model.pt")
    save_file(tensors, tmp_path / "one.safetensors")
    (tmp_path / "sharded").mkdir()
    for number, name in enumerate(tensors):
        save_file({name: tensors[name]}, tmp_path / "sharded" / f"{number}.safetensors")
    where = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for source in (
        from_tensors(tensors),
        from_file(tmp_path / "model.pt"),
        from_file(str(tmp_path / "one.safetensors")),
        from_file(tmp_path / "sharded"),
    ):
        assert torch.equal(source(["tied", "a.w"], SHAPE, HELD), part(tensors["a.w"]))
        assert torch.equal(source(["b"], (8,), (((2, 4),),)), tensors["b"][2:4])
        assert torch.equal(source(["s"], (), ()), tensors["s"])
        with pytest.raises(ProgramError, match="has no tensor 'c' of the model; it has 3"):
            source(["c"], (1,), (((0, 1),),))
        with pytest.raises(ProgramError, match=r"'a.w' has shape \[6, 8\] where the values are from, \[6, 9\] here"):
            source(["a.w"], (6, 9), HELD)
    with pytest.raises(ProgramError, match="there is no file of weights"):
        from_file(tmp_path / "nothing.pt")
    with pytest.raises(ProgramError, match=r"holds no model\.safetensors"):
        from_file(tmp_path)
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ProgramError, match="holds a list; expected the tensors of a state_dict"):
        from_file(tmp_path / "list.pt")
    with pytest.raises(ProgramError, match=r"'w' .*on the device 'meta' and has no values; give parallelize weights=…"):
        from_tensors({"w": torch.empty(2, device="meta")})(["w"], (2,), (((0, 2),),))


def test_random_numbers_are_those_of_their_elements() -> None:
    shape = (700, 400)
    source = random_values({"w": (0.5, 2.0), "v": (0.0, 1.0)}, seed=3)
    everything: Held = (((0, 700),), ((0, 400),))
    whole = source(["w", "tied"], shape, everything)
    held: Held = (((0, 2), (300, 302)), ((4, 8), (399, 400)))
    rows, columns = torch.tensor([0, 1, 300, 301]), torch.tensor([4, 5, 6, 7, 399])
    assert torch.equal(source(["w"], shape, held), whole[rows][:, columns])
    # 280 000 numbers: the mean is within 5 standard errors, and the distribution is the normal one's.
    assert abs(whole.mean().item() - 0.5) < 5 * 2.0 / 280_000**0.5
    assert abs(whole.std().item() - 2.0) < 0.02
    for deviations, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert abs(((whole - 0.5).abs() < 2.0 * deviations).float().mean().item() - share) < 0.005
    pairs = torch.corrcoef(torch.stack([whole.flatten()[:-1], whole.flatten()[1:]]))
    assert abs(pairs[0, 1].item()) < 0.01
    # Other names and seeds give others; what has no moments is zeros.
    assert not torch.equal(source(["v"], shape, everything), (whole - 0.5) / 2)
    assert not torch.equal(random_values({"w": (0.5, 2.0)}, seed=4)(["w"], shape, everything), whole)
    assert torch.equal(source(["u"], (3,), (((0, 2),),)), torch.zeros(2))
