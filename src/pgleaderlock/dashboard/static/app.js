// Begins what the page is about. Without it every page still shows what there was when it was loaded.

import { localTimes } from "./core.js";
import * as events from "./events.js";
import * as history from "./history.js";
import * as leaders from "./leaders.js";
import * as locks from "./locks.js";
import * as nodes from "./nodes.js";

document.body.dataset.live = "begins";
localTimes();
({ events, history, leaders, locks, nodes })[document.body.dataset.page]?.start();
