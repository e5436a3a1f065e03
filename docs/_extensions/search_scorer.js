// The order of the search's results: https://www.sphinx-doc.org/en/master/usage/configuration.html
// (html_search_scorer). Sphinx ranks each member of a class above every page.
var Scorer = {
  // A name of the reference loses with each dot, so that `aiordma.connect` is above a page whose
  // title has the word, and that page is above the members `timeout` and `connect_timeout`.
  score: ([page, title, anchor, description, score, file, kind]) => {
    if (kind === "object") return score - 7 * (title.split(".").length - 2);
    return page.match(/^(changelog|contributing|experiments|glossary)$/) ? score - 3 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 16,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
