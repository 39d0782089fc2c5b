"""Tables and figures drawn from the rows of benchmarks. Needs the ``bench`` extra (pandas, matplotlib); measures nothing."""
