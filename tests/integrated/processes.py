"""The 1.5D algorithm carried out: processes that hold blocks of small matrices, send words, and count what they get."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Blocks = dict[tuple[int, int], Matrix]


@dataclass
class Counter:
    """words: received by each process. rounds: in which it received something."""

    words: dict[tuple[int, int], int] = field(default_factory=dict)
    rounds: int = 0

    def receive(self, process: tuple[int, int], words: int) -> None:
        self.words[process] = self.words.get(process, 0) + words


def bruck_all_gather(
    group: list[tuple[int, int]], held: Blocks, counter: Counter
) -> dict[tuple[int, int], list[Matrix]]:
    """Everybody gets every block, in order; in round k they pass on as many blocks as they have, 2^k at most."""
    count = len(group)
    have = [[held[process]] for process in group]  # of member i: blocks i, i+1, …
    step = 1
    while step < count:
        counter.rounds += 1
        passed = [have[(i + step) % count][: min(step, count - step)] for i in range(count)]
        for i, blocks in enumerate(passed):
            counter.receive(group[i], sum(block.size for block in blocks))
            have[i] = have[i] + blocks
        step *= 2
    return {process: have[i][count - i :] + have[i][: count - i] for i, process in enumerate(group)}


def ring_all_reduce(group: list[tuple[int, int]], held: Blocks, counter: Counter) -> Blocks:
    """Everybody gets the sum: reduce-scatter around a ring, then all-gather around it, chunk by chunk."""
    count = len(group)
    shape = held[group[0]].shape
    chunks = [np.split(held[process].reshape(-1).copy(), count) for process in group]
    for step in range(count - 1):
        sent = [chunks[i][(i - step) % count].copy() for i in range(count)]
        for i in range(count):
            source = (i - 1) % count
            chunks[i][(source - step) % count] += sent[source]
            counter.receive(group[i], sent[source].size)
    for step in range(count - 1):
        sent = [chunks[i][(i + 1 - step) % count].copy() for i in range(count)]
        for i in range(count):
            source = (i - 1) % count
            chunks[i][(source + 1 - step) % count] = sent[source]
            counter.receive(group[i], sent[source].size)
    return {process: np.concatenate(chunks[i]).reshape(shape) for i, process in enumerate(group)}


@dataclass
class Trained:
    """What a step of a chain of products found, by layer, and what each process received for it."""

    outputs: list[Matrix]
    weight_gradients: list[Matrix]
    input_gradients: list[Matrix | None]
    gathered: Counter
    reduced_inputs: Counter
    reduced_weights: Counter


def train_step(weights: list[Matrix], data: Matrix, last_gradient: Matrix, rows: int, columns: int) -> Trained:
    """One forward and backward pass of Y_i = W_i X_i, X_(i+1) = Y_i, on a grid: W by rows, X by columns."""
    column = {j: [(i, j) for i in range(rows)] for j in range(columns)}
    row = {i: [(i, j) for j in range(columns)] for i in range(rows)}
    gathered, reduced_inputs, reduced_weights = Counter(), Counter(), Counter()
    inputs = [np.split(data, columns, axis=1)]
    for w in weights:
        parts = np.split(w, rows, axis=0)
        whole = []
        for j in range(columns):
            local = {(i, j): parts[i] @ inputs[-1][j] for i in range(rows)}
            full = bruck_all_gather(column[j], local, gathered)
            copies = [np.concatenate(full[process], axis=0) for process in column[j]]
            assert all(np.array_equal(copies[0], other) for other in copies)
            whole.append(copies[0])
        inputs.append(whole)
    gradients = np.split(last_gradient, columns, axis=1)
    weight_gradients: list[Matrix] = []
    input_gradients: list[Matrix | None] = []
    for number in reversed(range(len(weights))):
        parts = np.split(weights[number], rows, axis=0)
        pieces = [np.split(gradients[j], rows, axis=0) for j in range(columns)]
        summed = []
        for i in range(rows):
            local = {(i, j): pieces[j][i] @ inputs[number][j].T for j in range(columns)}
            summed.append(ring_all_reduce(row[i], local, reduced_weights)[(i, 0)])
        weight_gradients.insert(0, np.concatenate(summed, axis=0))
        if number == 0:
            input_gradients.insert(0, None)
            continue
        gradients = []
        for j in range(columns):
            local = {(i, j): parts[i].T @ pieces[j][i] for i in range(rows)}
            gradients.append(ring_all_reduce(column[j], local, reduced_inputs)[(0, j)])
        input_gradients.insert(0, np.concatenate(gradients, axis=1))
    return Trained(
        outputs=[np.concatenate(x, axis=1) for x in inputs[1:]],
        weight_gradients=weight_gradients,
        input_gradients=input_gradients,
        gathered=gathered,
        reduced_inputs=reduced_inputs,
        reduced_weights=reduced_weights,
    )
