"""Detection quality: a labelled corpus from seeds, the product judged on it, and scores with intervals.

Read in this order: draw.py (what chance decides about an episode), faults.py and benign.py (the classes, one table
each), answers.toml (what is right to say), trial.py (one episode through both stages), matching.py and score.py.
"""
