"""For all tests: Python looks for cycles seldom, and not among what collecting the tests has imported.

TensorFlow's graphs are made of hundreds of thousands of small objects, and the frameworks' modules of as many: with
Python's own settings a tenth of the suite's time went into looking through them.
"""

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)
