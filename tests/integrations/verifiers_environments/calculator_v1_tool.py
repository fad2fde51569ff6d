"""The tool server of calculator_v1: a program of its own."""

import verifiers.v1 as vf


class CalculatorToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "calculator"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


if __name__ == "__main__":
    CalculatorToolset.run()
