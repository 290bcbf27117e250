"""Environments: how they are named, created and stepped, in this process, in workers or on the device.

Registers unidle's own environments with Gymnasium, which has had no plugin entry points since version 1. `import
unidle` does it if Gymnasium is imported already, and `gymnasium.make("unidle.envs:unidle/Mission-v0")` always.
"""

import gymnasium

gymnasium.register("unidle/Mission-v0", entry_point="unidle.tasks.mission.gym_env:MissionEnv")
gymnasium.register("unidle/SiteExplore-v0", entry_point="unidle.tasks.web.gym_env:SiteExploreEnv")
gymnasium.register("unidle/Trading-v0", entry_point="unidle.tasks.trading.gym_env:TradingEnv")
