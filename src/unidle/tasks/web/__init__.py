"""unidle/SiteExplore-v0: focused crawling of a website over HTTP."""
