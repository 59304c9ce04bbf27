"""How it is computed: statistics of gates, fused layers, CUDA graphs."""
