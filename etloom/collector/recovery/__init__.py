"""Recovery of what killed or interrupted jobs left behind, and gathering of several hosts' recordings."""
