"""One protocol for every comparison of methods: `python -m experiments.protocol NAME --out docs/results`.

1. Every method at every budget is searched in the same dimensions (`settings`): how far it may move,
   clip norm, clients of a release (so how many releases), local steps, what is published, decay.
2. A search (`search`) looks at a coarse grid, then walks from the best few settings to neighbours,
   one step in each dimension, until none is better: grids grow as far as that takes, so no chosen
   setting lies at the edge of what was tried.
3. Settings are chosen on other people (real streams, MNIST) or other made-up worlds, and on other
   seeds, than the ten that are reported.
4. Labels alone (`labels`) are methods too: the majority, running shares, and noisy counts at the
   same budget.
5. Results have every seed; differences are paired, with intervals (`tables`).

What comes out, for a comparison NAME: `NAME.csv` (every method and seed), `NAME-search.csv`
(every setting tried) and `NAME-log.csv` (runs, the chosen setting and what bounds it).
"""
