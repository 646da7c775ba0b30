"""The parts of report.html: markup, numbers, charts, and the sections of a run and of a comparison."""
