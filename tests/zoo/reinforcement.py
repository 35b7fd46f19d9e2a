"""Losses of reinforcement learning."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.zoo.registry import Family, coins, floats, uniform, whole

zoo = Family("reinforcement")

ACTIONS = 4
STEPS = {
    "states": floats(8, 6), "actions": whole(8, high=ACTIONS), "rewards": floats(8), "after": floats(8, 6),
    "ended": coins(8, share=0.2),
}  # fmt: skip
MOVES = {**STEPS, "actions": uniform(8, 2, low=-0.9, high=0.9)}


def network(outputs: int, inputs: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


@zoo.of("DQN with a target network", **STEPS)
class Dqn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(ACTIONS)
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, states: Any, actions: Any, rewards: Any, after: Any, ended: Any) -> Any:
        found = self.net(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            wanted = rewards + 0.9 * (1 - ended) * self.target(after).max(1).values
        return functional.smooth_l1_loss(found, wanted)


@zoo.of("double DQN, target moved", **STEPS)
class DoubleDqn(Dqn):
    def forward(self, states: Any, actions: Any, rewards: Any, after: Any, ended: Any) -> Any:
        found = self.net(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.net(after).argmax(1, keepdim=True)
            wanted = rewards + 0.9 * (1 - ended) * self.target(after).gather(1, best).squeeze(1)
            for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        return (found - wanted).square().mean()


@zoo.of("duelling DQN", **STEPS)
class Duelling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.value, self.advantage = nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, ACTIONS)

    def q(self, states: Any) -> Any:
        z = self.trunk(states).relu()
        advantage = self.advantage(z)
        return self.value(z) + advantage - advantage.mean(1, keepdim=True)

    def forward(self, states: Any, actions: Any, rewards: Any, after: Any, ended: Any) -> Any:
        wanted = (rewards + 0.9 * (1 - ended) * self.q(after).amax(1)).detach()
        return functional.mse_loss(self.q(states)[torch.arange(8, device=states.device), actions], wanted)


@zoo.of("QR-DQN", **STEPS)
class QuantileDqn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(ACTIONS * 5)

    def forward(self, states: Any, actions: Any, rewards: Any, after: Any, ended: Any) -> Any:
        found = self.net(states).view(-1, ACTIONS, 5)
        found = found.gather(1, actions[:, None, None].expand(-1, 1, 5)).squeeze(1)
        with torch.no_grad():
            later = self.net(after).view(-1, ACTIONS, 5)
            best = later.mean(2).argmax(1)
            chosen = later.gather(1, best[:, None, None].expand(-1, 1, 5)).squeeze(1)
            wanted = rewards[:, None] + 0.9 * (1 - ended[:, None]) * chosen
        e = wanted[:, None, :] - found[:, :, None]
        huber = torch.where(e.abs() <= 1, 0.5 * e.square(), e.abs() - 0.5)
        levels = (torch.arange(5, device=e.device, dtype=e.dtype) + 0.5) / 5
        return ((levels[None, :, None] - (e.detach() < 0).to(e.dtype)).abs() * huber).mean(2).sum(1).mean()


@zoo.of("C51", **STEPS)
class Categorical(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(ACTIONS * 6)
        self.register_buffer("support", torch.linspace(-2.0, 2.0, 6))

    def forward(self, states: Any, actions: Any, rewards: Any, after: Any, ended: Any) -> Any:
        logs = self.net(states).view(-1, ACTIONS, 6).log_softmax(-1)
        logs = logs[torch.arange(len(states), device=states.device), actions]
        with torch.no_grad():
            p = self.net(after).view(-1, ACTIONS, 6).softmax(-1)
            best = (p * self.support).sum(-1).argmax(1)
            p = p.gather(1, best[:, None, None].expand(-1, 1, 6)).squeeze(1)
            places = (rewards[:, None] + 0.9 * (1 - ended[:, None]) * self.support).clamp(-2, 2)
            places = (places + 2) / 0.8
            low = places.floor().long().clamp(0, 4)
            share = places - low
            wanted = torch.zeros_like(p).scatter_add_(1, low, p * (1 - share)).scatter_add_(1, low + 1, p * share)
        return -(wanted * logs).sum(1).mean()


@zoo.of(
    "PPO", states=floats(8, 6), actions=whole(8, high=ACTIONS), before=uniform(8, low=-2.0, high=-0.5),
    advantages=floats(8), returns=floats(8), values=floats(8),
)  # fmt: skip
class Ppo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = network(ACTIONS), network(1)

    def forward(self, states: Any, actions: Any, before: Any, advantages: Any, returns: Any, values: Any) -> Any:
        logs = self.policy(states).log_softmax(-1)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = (logs.gather(1, actions[:, None]).squeeze(1) - before).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        v = self.value(states).squeeze(-1)
        clipped = values + (v - values).clamp(-0.2, 0.2)
        error = torch.max((v - returns).square(), (clipped - returns).square()).mean()
        entropy = -(logs.exp() * logs).sum(-1).mean()
        return -gain + 0.5 * error - 0.01 * entropy


@zoo.of("PPO by torch.distributions", states=floats(8, 6), actions=whole(8, high=ACTIONS), before=floats(8))
class PpoDistribution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = network(ACTIONS)

    def forward(self, states: Any, actions: Any, before: Any) -> Any:
        policy = torch.distributions.Categorical(logits=self.policy(states))
        return -(policy.log_prob(actions) * before).mean() - 0.01 * policy.entropy().mean()


@zoo.of(
    "A2C with generalised advantages", states=floats(4, 6, 6), actions=whole(4, 6, high=ACTIONS), rewards=floats(4, 6)
)
class Gae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = network(ACTIONS), network(1)

    def forward(self, states: Any, actions: Any, rewards: Any) -> Any:
        values = self.value(states).squeeze(-1)
        with torch.no_grad():
            later = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], 1)
            deltas = rewards + 0.9 * later - values
            advantage, found = torch.zeros_like(deltas[:, 0]), []
            for step in reversed(range(6)):
                advantage = deltas[:, step] + 0.9 * 0.95 * advantage
                found.insert(0, advantage)
            advantages = torch.stack(found, 1)
        logs = -functional.cross_entropy(self.policy(states).flatten(0, 1), actions.flatten(), reduction="none")
        return -(logs.view_as(advantages) * advantages).mean() + (values - advantages - values.detach()).square().mean()


@zoo.of("SAC with given noise", **MOVES, noise=floats(8, 2))
class Sac(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = network(4)
        self.critics = nn.ModuleList([network(1, 8) for _ in range(2)])
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(-1.0))

    def acted(self, states: Any, noise: Any) -> Any:
        mean, logs = self.actor(states).chunk(2, -1)
        logs = logs.clamp(-5, 2)
        u = mean + logs.exp() * noise
        action = u.tanh()
        probability = (-0.5 * noise.square() - logs - 0.919).sum(-1) - (1 - action.square() + 1e-6).log().sum(-1)
        return action, probability

    def forward(self, states: Any, actions: Any, rewards: Any, after: Any, ended: Any, noise: Any) -> Any:
        alpha = self.temperature.exp()
        with torch.no_grad():
            later, logs = self.acted(after, noise)
            pair = torch.cat([after, later], -1)
            least = torch.minimum(*(critic(pair).squeeze(-1) for critic in self.targets))
            wanted = rewards + 0.99 * (1 - ended) * (least - alpha * logs)
        pair = torch.cat([states, actions], -1)
        critics = sum(functional.mse_loss(critic(pair).squeeze(-1), wanted) for critic in self.critics)
        action, logs = self.acted(states, noise)
        least = torch.min(*(critic(torch.cat([states, action], -1)).squeeze(-1) for critic in self.critics))
        actor = (alpha.detach() * logs - least).mean()
        return critics + actor - (self.temperature * (logs.detach() - 2)).mean()


@zoo.of("SAC with noise drawn", is_random=True, **MOVES)
class SacDrawn(Sac):
    def forward(self, states: Any, actions: Any, rewards: Any, after: Any, ended: Any) -> Any:
        return super().forward(states, actions, rewards, after, ended, torch.randn_like(actions))


@zoo.of("TD3 with functional critics", **MOVES, noise=floats(8, 2))
class Td3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = network(2), network(2, 8)
        self.slow_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.slow_critic = copy.deepcopy(self.critic).requires_grad_(False)

    def forward(self, states: Any, actions: Any, rewards: Any, after: Any, ended: Any, noise: Any) -> Any:
        with torch.no_grad():
            later = (self.slow_actor(after).tanh() + (0.2 * noise).clamp(-0.5, 0.5)).clamp(-1, 1)
            wanted = rewards + 0.99 * (1 - ended) * self.slow_critic(torch.cat([after, later], -1)).min(-1).values
        loss = (self.critic(torch.cat([states, actions], -1)) - wanted[:, None]).square().sum(-1).mean()
        held = {name: value.detach() for name, value in self.critic.named_parameters()}
        acted = torch.cat([states, self.actor(states).tanh()], -1)
        return loss - torch.func.functional_call(self.critic, held, (acted,))[:, 0].mean()


@zoo.of("IQL", **MOVES)
class Iql(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.actor = network(1, 8), network(1), network(2)

    def forward(self, states: Any, actions: Any, rewards: Any, after: Any, ended: Any) -> Any:
        q, v = self.q(torch.cat([states, actions], -1)).squeeze(-1), self.v(states).squeeze(-1)
        e = q.detach() - v
        value = (torch.where(e > 0, 0.8, 0.2) * e.square()).mean()
        wanted = rewards + 0.9 * (1 - ended) * self.v(after).squeeze(-1).detach()
        weight = (3 * e.detach()).exp().clamp(max=100)
        actor = (weight * (self.actor(states).tanh() - actions).square().sum(-1)).mean()
        return value + functional.mse_loss(q, wanted) + actor


@zoo.of("decision transformer", states=floats(4, 4, 6), actions=uniform(4, 4, 2, low=-1.0), togo=floats(4, 4, 1))
class Decisions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state, self.action, self.togo = nn.Linear(6, 16), nn.Linear(2, 16), nn.Linear(1, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, states: Any, actions: Any, togo: Any) -> Any:
        x = torch.stack([self.togo(togo), self.state(states), self.action(actions)], 2).flatten(1, 2)
        mask = nn.Transformer.generate_square_subsequent_mask(12, device=x.device, dtype=x.dtype)
        z = self.layer(x, src_mask=mask, is_causal=True).view(4, 4, 3, 16)
        return functional.mse_loss(self.head(z[:, :, 1]).tanh(), actions)


@zoo.of("V-trace", states=floats(4, 5, 6), actions=whole(4, 5, high=ACTIONS), before=floats(4, 5), rewards=floats(4, 5))
class Vtrace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = network(ACTIONS), network(1)

    def forward(self, states: Any, actions: Any, before: Any, rewards: Any) -> Any:
        logs = self.policy(states).log_softmax(-1).gather(2, actions[..., None]).squeeze(-1)
        values = self.value(states).squeeze(-1)
        with torch.no_grad():
            rho = (logs - before).exp().clamp(max=1.0)
            later = functional.pad(values[:, 1:], (0, 1))
            deltas = rho * (rewards + 0.9 * later - values)
            total, targets = torch.zeros_like(deltas[:, 0]), []
            for step in range(4, -1, -1):
                total = deltas[:, step] + 0.9 * rho[:, step] * total
                targets.append(total + values[:, step])
            wanted = torch.stack(targets[::-1], 1)
            gain = rho * (rewards + 0.9 * functional.pad(wanted[:, 1:], (0, 1)) - values)
        return (values - wanted).square().mean() - (gain * logs).mean()


@zoo.of("DPO", chosen=whole(4, 6, high=12), rejected=whole(4, 6, high=12))
class Dpo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 12))
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def likelihood(self, model: Any, words: Any) -> Any:
        logs = model(words[:, :-1]).log_softmax(-1)
        return logs.gather(2, words[:, 1:, None]).squeeze(-1).sum(-1)

    def forward(self, chosen: Any, rejected: Any) -> Any:
        gain = self.likelihood(self.policy, chosen) - self.likelihood(self.policy, rejected)
        with torch.no_grad():
            base = self.likelihood(self.reference, chosen) - self.likelihood(self.reference, rejected)
        return -functional.logsigmoid(0.1 * (gain - base)).mean()
