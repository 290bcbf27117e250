"""Environments: what a user names, how it is stepped, and unidle's own. Importing it tells Gymnasium of the latter."""

import gymnasium

gymnasium.register("unidle/Mission-v0", entry_point="unidle.envs.mission_twin:MissionEnv")
gymnasium.register("unidle/SiteExplore-v0", entry_point="unidle.envs.site_explore_twin:SiteExploreEnv")
gymnasium.register("unidle/Trading-v0", entry_point="unidle.envs.trading_twin:TradingEnv")
