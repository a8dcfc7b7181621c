"""One protocol for every comparison of methods: `python -m experiments.protocol NAME --out docs/results`.

1. Every method at every budget is searched in the same dimensions (`settings`): how far it may move,
   clip norm, clients of a release (so how many releases), local steps, what is published, decay.
2. A search (`search`) looks at a coarse grid, then walks from the best few settings to neighbours,
   one step in each dimension, until none is better: grids grow as far as that takes, so no chosen
   setting lies at the edge of what was tried. A limit of ours counts as an edge in the log.
3. Settings are chosen on other people (real streams, MNIST) or other made-up worlds, and on other
   seeds, than the ten that are reported.
4. Labels alone (`labels`) are methods too: the majority, running shares, and noisy counts at the
   same budget.
5. Results have every seed; differences are paired, with intervals (`tables`).

What comes out, with the comparison's name in the first column: `comparisons.csv` (every method and
seed, with its chosen setting), `comparisons-curves.csv` (accuracy over the run),
`comparisons-log.csv` (runs, and what bounds each choice) and `comparisons-search.csv` (every setting
tried, as points of the grid). A search that was stopped goes on from there. Most of it needs a GPU:
on an H200 with 16 cores all comparisons took ten minutes; on two cores each takes hours.
"""
