// The order of search results (html_search_scorer). By default, Sphinx ranks class members above pages:
// https://www.sphinx-doc.org/en/master/usage/configuration.html
var Scorer = {
  // Each dot lowers a name's score. `aiordma.connect` ranks above a page with that word in its
  // title, and the page above members such as `connect_timeout`.
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
