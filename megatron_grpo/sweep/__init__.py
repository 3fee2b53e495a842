"""Many runs of one study: arms x seeds, resumable, with their statistics. Imports neither torch nor an engine."""
