// Begins what the page is about. Without it every page still shows what there was when it was loaded.

import { colourRows } from "./colours.js";
import { byId, localTimes } from "./core.js";
import * as events from "./events.js";
import * as history from "./history.js";
import * as leaders from "./leaders.js";
import * as locks from "./locks.js";
import * as nodes from "./nodes.js";

document.body.dataset.live = "begins";
localTimes();
const asLoaded = (id) => ({ start: () => colourRows(byId(id)) }); // shows the moment when it was loaded
const [incidents, slots] = [asLoaded("incidents"), asLoaded("slots")];
({ events, history, incidents, leaders, locks, nodes, slots })[document.body.dataset.page]?.start();
