"""Sharding rules: how the dims of an operator's operands and results correspond, for one call of an ATen operator."""

from pase.importers.torch.sharding_rules.rule import Factor, ShardingRule
from pase.importers.torch.sharding_rules.table import sharding_rule

__all__ = ["Factor", "ShardingRule", "sharding_rule"]
