// The page of a pack: one row per job.

const COLUMNS = [
  { title: "job", cell: (job) => (job.run ? link(job.name, addressOf("run", job.run)) : job.name), order: (job) => job.name },
  { title: "state", cell: (job) => element("span", job.state, `state ${job.state}`), order: (job) => job.state },
  { title: "exit code", cell: (job) => job.exit, order: (job) => Number(job.exit) || 0, right: true },
  { title: "time", cell: (job) => job.time, order: () => null, right: true },
  { title: "steps/s", cell: (job) => job.rate, order: () => null, right: true },
  { title: "cores", cell: (job) => job.cores, order: (job) => Number(job.cores) || 0, right: true },
  { title: "most memory", cell: (job) => job.memory, order: () => null, right: true },
  { title: "command", cell: (job) => element("code", job.note ? `${job.command} (${job.note})` : job.command), order: (job) => job.command },
];
const show = makeTable(byId("table"), COLUMNS, (job) => job.name);

follow(`${location.pathname}/events`, (view) => {
  document.title = `${view.name} · unidle`;
  setText("name", view.name);
  showFacts(view.facts);
  const running = view.jobs.filter((job) => job.state === "running").length;
  showState(running ? `${running} running` : "", "training");
  show(view.jobs);
});
