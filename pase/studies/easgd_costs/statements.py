"""All that You et al. 2017 state of costs, beside what follows, with a verdict."""

from collections.abc import Iterator

from pase.studies.easgd_costs.breakdown_statements import breakdown_statements
from pase.studies.easgd_costs.judgement import Statement
from pase.studies.easgd_costs.scaling_statements import scaling_statements
from pase.studies.easgd_costs.text_statements import text_statements


def statements() -> Iterator[Statement]:
    """Yield Table 3 and its text, Table 4 and its text, then sizes, units and what the text leaves open."""
    yield from breakdown_statements()
    yield from scaling_statements()
    yield from text_statements()
