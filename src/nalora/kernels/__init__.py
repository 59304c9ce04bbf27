"""Statistics of gates, fused layers and CUDA graphs."""
