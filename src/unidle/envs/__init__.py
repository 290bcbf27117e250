"""Environments: what a user names, how it is stepped, and unidle's own. Importing it tells Gymnasium of the latter."""

import gymnasium

gymnasium.register("unidle/Mission-v0", entry_point="unidle.tasks.mission.gym_env:MissionEnv")
gymnasium.register("unidle/SiteExplore-v0", entry_point="unidle.tasks.web.gym_env:SiteExploreEnv")
gymnasium.register("unidle/Trading-v0", entry_point="unidle.tasks.trading.gym_env:TradingEnv")
